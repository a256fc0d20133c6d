"""Models whose graph differs from sample to sample, evaluated in batches all the same."""
