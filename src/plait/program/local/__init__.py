"""The graph that one rank runs: local shapes, and communication where placements change."""
