"""What the parts of a program cost on a cluster: time and memory."""
