"""Jobs that are named, on the command line or in a run folder."""
