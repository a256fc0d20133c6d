"""How fast processes reach each other: this machine's ways, side by side."""
