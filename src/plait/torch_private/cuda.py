"""Of CUDA: a kernel that only waits. Private to torch (`torch.cuda._sleep`)."""

import torch


def sleep(cycles: int) -> None:
    """Keep the current stream busy for so many clock cycles: what is queued meanwhile runs without gaps."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
