"""Proofs that a program is sound, before anything runs."""
