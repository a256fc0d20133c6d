"""Copies of fake tensors: models that copy their own layers are built without memory."""

import copy

import torch
from torch import Tensor, nn

from plait.torch_private.fake import FakeTensorMode


def test_a_module_copies_its_layers_on_fake_tensors() -> None:
    with FakeTensorMode():
        layer = nn.BatchNorm1d(3)
        layer.weight.no_decay = True  # type: ignore[attr-defined]
        layer.first = layer.weight
        layer.scale = torch.tensor([2.0])
        found = copy.deepcopy(layer)
    assert found.first is found.weight
    assert found.weight is not layer.weight
    assert isinstance(found.weight, nn.Parameter)
    assert found.weight.no_decay  # type: ignore[attr-defined]
    counter, scale = found.num_batches_tracked, found.scale
    assert isinstance(counter, Tensor)
    assert isinstance(scale, Tensor)
    assert (counter.shape, counter.dtype) == (torch.Size(()), torch.int64)
    assert scale.shape == (1,)
