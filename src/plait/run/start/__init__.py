"""Processes: started, watched, ended, and told apart when they fail."""
