"""Files that are broken in every way that we can think of: each is read or refused, none ends in a traceback."""
