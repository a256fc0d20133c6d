"""The tasks that an engine started on several hosts, as one run."""
