"""A rank's run, step after step, and what it writes down."""
