"""What is shown of a run while it goes on: a bar, lines, and the tools that people look at."""
