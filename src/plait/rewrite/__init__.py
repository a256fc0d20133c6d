"""Rewriting: a captured graph becomes a cheaper one that computes the same."""
