"""Code for one sample, written down as it runs and run for many."""
