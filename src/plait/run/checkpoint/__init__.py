"""Checkpoints: what they hold, how they are written whole or not at all, and read back."""
