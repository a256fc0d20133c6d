"""How fast this machine is: its ops, its memory, its links."""
