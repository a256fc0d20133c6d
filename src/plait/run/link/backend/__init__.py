"""`plait_shm`: a backend of torch.distributed."""
