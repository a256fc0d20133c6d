"""Faults at random moments of real runs, over plans and phases; see `__main__.py`."""
