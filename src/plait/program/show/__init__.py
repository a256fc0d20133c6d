"""What a plan makes of a graph, written down for people."""
