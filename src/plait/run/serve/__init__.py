"""Servers and centers, and how a worker reaches them."""
