"""From a job's model and loss to one flat, functional graph."""
