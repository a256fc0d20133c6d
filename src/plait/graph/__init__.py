"""THE STEP: capture, cost, rewrite and draw what one training step computes."""
