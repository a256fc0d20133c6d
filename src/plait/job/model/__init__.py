"""The network of a job: copied, converted, its first weights, what Python can reach of it."""
