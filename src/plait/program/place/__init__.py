"""Where every tensor is: placements along mesh axes, and how they pass through ops."""
