"""A captured step as numbers, lists and pictures."""
