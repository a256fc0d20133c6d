"""HOW: every decision about a parallel run in one frozen value, and the named plans."""
