"""Data: what people hand over, opened as sources and loaded share by share."""
