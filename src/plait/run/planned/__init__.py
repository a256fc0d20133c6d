"""A loop of the user's own under plans that decide about a whole step: it is recorded, then run as one."""
