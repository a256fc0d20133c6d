"""AlexNet's split of 2012 as a placement file: it computes what one process computes, and exchanges as the paper does.

Krizhevsky et al. 2012, section 3.5 and figure 2: half of the kernels and neurons on each of two devices; conv2, conv4
and conv5 see only what is on their own device; conv3 and the fully connected layers see everything.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from plait.api.graphs import placements
from plait.job.job import Job
from plait.job.named.reference import load_job
from plait.plan.named import resolve
from plait.program.show.listing import Listing
from plait.run.verify import verify

EXAMPLES = Path(__file__).parents[4] / "examples"
PLAN = EXAMPLES / "alexnet_two_devices.yaml"
BATCH = 6


def small_job() -> Job:
    """The example on a few images, without its held-out data."""
    job = load_job(str(EXAMPLES / "alexnet_fashion.py"))
    images = torch.randn(3 * BATCH, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(images, torch.arange(3 * BATCH) % 10)
    return replace(job, data=data, batch=BATCH, evaluate=None, evaluate_every=None)


@pytest.fixture(scope="module")
def listing() -> Listing:
    return placements(small_job(), resolve(PLAN, None)).listing


def test_two_devices_compute_what_one_computes() -> None:
    outcome = verify(small_job(), PLAN, serial=True, steps=2)
    assert outcome.ok, outcome.first


def test_half_of_every_layer_is_on_each_device(listing: Listing) -> None:
    held = {entry.name: (entry.placements, entry.held) for entry in listing.parameters}
    assert held.pop("fc8.bias") == (("R",), "[10]")  # ten numbers, added once
    assert held.pop("fc8.weight") == (("S(1)",), "[10, 128]")
    assert {placements for placements, _ in held.values()} == {("S(0)",)}
    assert held["conv2.weight"] == (("S(0)",), "[32, 16, 3, 3]")


def test_forward_exchanges_at_conv3_and_the_fully_connected_layers(listing: Listing) -> None:
    found = [
        (entry.collective, entry.what.split()[0], entry.user)
        for entry in listing.transfers
        if entry.phase == "forward" and entry.collective != "none"
    ]
    assert found == [
        ("all_gather", "pool2", "conv3 forward convolution 1"),
        ("all_gather", "drop6", "fc6 forward addmm 1"),
        ("all_gather", "drop7", "fc7 forward addmm 1"),
        ("all_reduce", "fc8", "forward _log_softmax 1"),
    ]


def test_backward_exchanges_at_the_same_layers(listing: Listing) -> None:
    """Inputs are gathered again for the gradients of the weights; gradients of the inputs are summed."""
    found = {
        (entry.collective, (entry.what if entry.collective == "reduce_scatter" else entry.user).split()[0])
        for entry in listing.transfers
        if entry.phase == "backward" and entry.collective != "none"
    }
    layers = ("conv3", "fc6", "fc7")
    assert found == {(kind, layer) for kind in ("all_gather", "reduce_scatter") for layer in layers}
    assert sum(total.count for total in listing.totals) == 4 + 6


def test_conv2_conv4_and_conv5_exchange_nothing(listing: Listing) -> None:
    for entry in listing.ops:
        if entry.module in ("conv2", "conv4", "conv5"):
            assert "R" not in entry.strategies[0] and "P" not in entry.strategies[0]
    assert not listing.fallbacks
