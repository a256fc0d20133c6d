"""The pictures of docs/placements.md, drawn from programs that plait compiled: `python -m docs.pictures`."""
