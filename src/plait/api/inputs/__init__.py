"""What people write for a job and its settings, and what a run folder remembers of it."""
