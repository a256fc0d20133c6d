"""The pictures of docs: those of placements.md from programs, those of pipelines.md from schedules."""
