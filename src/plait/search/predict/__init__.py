"""What a plan costs: by its compiled program, or by a sketch of the model's units."""
