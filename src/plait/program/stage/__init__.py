"""Which stage of a pipeline every op is in, and in which order the ranks of a pipeline work."""
