"""A program executed on real tensors: one rank in a process, or all ranks in one."""
