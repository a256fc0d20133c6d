"""The local graph cut into segments: between communications, into buckets, by stages, run again."""
