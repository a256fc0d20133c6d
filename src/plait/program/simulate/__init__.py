"""The simulator: a program interpreted by advancing clocks."""
