"""Collectives and messages through memory that ranks of one host share."""
