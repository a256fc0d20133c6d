"""WITH WHAT: devices, memory, links and their speeds."""
