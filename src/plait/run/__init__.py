"""DO IT: processes, communication, checkpoints, and the interpreters of a Program."""
