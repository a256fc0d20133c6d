"""Published measurements: read, predicted, compared."""
