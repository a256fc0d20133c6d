"""What the parent of ranks does: it starts them, hears them, and goes on where some are lost."""
