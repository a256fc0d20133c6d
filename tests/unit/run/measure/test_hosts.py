"""The link between hosts is measured with numbers that travel as they are."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from plait.run.measure import hosts


def test_what_is_sent_to_measure_a_link_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros of float32 would travel as next to nothing, and the link would seem as fast as that."""
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(dist, "barrier", lambda group: None)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: sent.append(tensor))
    group: Any = object()
    assert hosts._all_reduce_s(1 << 16, group) >= 0
    assert sent and all(tensor.nbytes == 1 << 16 and tensor.dtype != torch.float32 for tensor in sent)
