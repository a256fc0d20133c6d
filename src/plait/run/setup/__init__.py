"""A rank made ready: its device, its allocator, and that all ranks begin with the same."""
