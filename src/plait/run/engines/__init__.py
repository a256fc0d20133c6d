"""What a person would type to have an engine start a run: command lines, a batch script, a manifest. Nothing is
started here."""
