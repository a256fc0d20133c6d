"""Which plan: candidates, bounds, ranking, reasons."""
