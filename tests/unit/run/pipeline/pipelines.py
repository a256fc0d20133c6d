"""Verify a case of the zoo under a pipeline, in one process; captures and the one-process runs are shared by all plans.

In: the name of a case, a number of micro-batches. Out: the one-process run that plans are compared with.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from tests.unit.run.training import CASES
from tests.zoo import ZOO

from plait.graph.from_job import Captures
from plait.job.job import Job
from plait.run.proof.reference import Reference, reference_of
from plait.run.verify import Verification, verify

SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-2")
"""Every synchronous one."""
SMALL = ("mlp", "lstm", "gpt", "gpt_tied", "gpt_dropout", "masked_gpt", "ignore_index")
EVERYWHERE = ("mlp", "gpt_tied", "gpt_dropout")
"""Small models that are tried under every schedule: of one stream, with a tied parameter, with random numbers."""
LARGE = ("graph_network", "moe_dense", "moe_capacity", "alexnet", "unet", "resnet_bn")
TRANSFORMERS = ("hf_gpt2", "hf_llama", "hf_bert", "hf_vit", "hf_t5")
NAMES = (*SMALL, *LARGE, *TRANSFORMERS)
TIED = ("gpt_tied", "hf_gpt2", "hf_bert", "hf_t5")
"""Embedding and head are one parameter."""
THRICE = "hf_t5"
"""The encoder, the decoder and the head have one embedding; interleaved, two of their stages are on one rank."""
SLICED = "hf_vit"
"""The gradient of the patches is that of the sequence without its first token."""
STEPS, NUM_SAMPLES = 2, 26
BATCH = {1: 7, 4: 7, 7: 13}
"""Samples a step by micro-batches: those of 4 have 2, 2, 2 and 1 samples, those of 7 have 2 and the last one 1."""
EVEN = (*TRANSFORMERS, "alexnet", "unet", "resnet_bn")
"""Four micro-batches of these have 2 samples each: another size is another capture and program, and smaller models
stand for it."""


def in_turn(names: Sequence[str], others: Sequence[str], count: int) -> list[tuple[str, str]]:
    """Each name with `count` of the others, the next name with the next ones: pairs stand for the whole square."""
    turns = [(number * count + k) % len(others) for number in range(len(names)) for k in range(count)]
    return [(names[at // count], others[turn]) for at, turn in enumerate(turns)]


def job_of(name: str, micro_batches: int, **changes: Any) -> Job:
    """AdamW on ragged micro-batches, in float64."""
    batch = 8 if micro_batches == 4 and name in EVEN else BATCH.get(micro_batches, 7)
    given: dict[str, Any] = {"batch": batch, "num_samples": NUM_SAMPLES}
    given |= {"optimizer": "adamw", "steps": STEPS, "accumulate": micro_batches}
    return {**ZOO, **CASES}[name].job(**(given | changes))


def is_compared(name: str) -> bool:
    """Whether the one-process run is held against the user's own code here too: where that rounds to float32 by itself,
    it takes captures in float32, whole and halved, and `test_parity.py` does it for all of them."""
    return not {**ZOO, **CASES}[name].float32_inside


@cache
def captures(name: str) -> Captures:
    """The graphs of a case."""
    return Captures(job_of(name, 1), None, torch.float64)


@cache
def reference(name: str, micro_batches: int, clip_norm: float | None = None, batch: int = 0) -> Reference:
    """What one process makes of the same micro-batches; `batch` 0: that of `BATCH`."""
    given: dict[str, Any] = {"batch": batch} if batch else {}
    job = job_of(name, micro_batches, clip_norm=clip_norm, **given)
    return reference_of(job, steps=STEPS, captures=captures(name), eager=is_compared(name))


def check(
    known: Reference,
    schedule: str,
    ranks: int | None = None,
    mesh: Mapping[str, int] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Verification:
    """Verify a schedule on all its ranks in this process."""
    return verify(known.job, schedule, ranks, mesh=mesh, settings=settings, serial=True, against=known)


def differences(found: Verification) -> dict[str, float]:
    """The largest of each kind that is not zero."""
    return {entry.kind: entry.largest for entry in found.differences if entry.largest != 0.0}


def assert_equal(found: Verification) -> None:
    """Every loss, gradient, weight and buffer, within float64's tolerance."""
    assert found.ok, found.first
    assert {entry.kind for entry in found.differences} >= {"loss", "gradient", "weight", "spread"}


def assert_same_bits(found: Verification) -> None:
    """Not one bit of a loss, gradient, weight or buffer differs."""
    assert_equal(found)
    assert differences(found) == {}


def compare(name: str, schedule: str, stages: int, micro_batches: int) -> Verification:
    """Verify a case; raises unless it equals one process, to the bit where no sum changes its order."""
    found = check(reference(name, micro_batches), schedule, stages)
    if (name in TIED and micro_batches > 1) or name in (THRICE, SLICED):
        assert_equal(found)
    else:
        assert_same_bits(found)
    return found
