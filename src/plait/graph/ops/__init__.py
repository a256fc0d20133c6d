"""Ops of our own: attention, batch norm, LSTM, random numbers."""
