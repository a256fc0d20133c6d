"""Runs whose workers do not march in step: tickets, the loop of a worker, servers, and what the parent writes down."""
