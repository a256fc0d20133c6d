"""plait turns one description of a training job into a program for any number of devices."""
