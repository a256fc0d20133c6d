"""What a run writes down: steps, samples, evaluations, and the folder that they are in."""
