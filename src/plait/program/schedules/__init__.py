"""In which order the ranks of a pipeline work: one small file per schedule."""
