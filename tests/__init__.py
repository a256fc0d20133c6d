"""The tests: unit (one process), ranks (real processes), gpu."""
