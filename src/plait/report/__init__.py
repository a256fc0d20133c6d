"""SHOW IT: a Trace as tables, timelines and pages."""
