"""The user's own code on a rank's share, and what it takes to be part of a whole batch."""
