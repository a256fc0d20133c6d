"""How long the parts of a program take on a cluster."""
