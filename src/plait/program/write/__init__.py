"""The instructions of a step, written down."""
