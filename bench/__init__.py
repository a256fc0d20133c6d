"""Side-by-side measurements against other systems."""
