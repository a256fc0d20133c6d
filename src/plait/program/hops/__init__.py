"""Collectives as programs of messages."""
