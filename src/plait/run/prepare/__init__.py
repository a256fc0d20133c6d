"""Everything that can be found out before a process starts."""
