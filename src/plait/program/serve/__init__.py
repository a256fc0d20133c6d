"""What a server decides: when an update is due, whose request may be answered. Pure logic."""
