"""How the processes of one run reach each other: nothing listens, nothing is unpickled, every size is checked."""
