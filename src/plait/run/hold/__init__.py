"""What a rank holds from step to step: parameters, buffers, gradients, optimizer state."""
