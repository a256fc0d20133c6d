"""The parts of `plait try`: what may be tried, what is tried next, and the runs that do it."""
