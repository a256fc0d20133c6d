"""WHICH: predict, rank and choose a Plan."""
