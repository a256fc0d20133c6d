"""The proof that a plan computes what one process does."""
