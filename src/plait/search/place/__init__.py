"""Within operators: placements chosen by pattern or by an exact solver."""
