"""The parent watches its ranks: that they move, why one has failed, who asks the run to end."""
