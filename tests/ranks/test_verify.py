"""`verify`: real ranks compute what one process computes, and a wrong reduction does not get past it."""

import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks import jobs
from tests.zoo import ZOO, unstack, vectors
from torch import Tensor, nn

import plait
from plait.errors import UsageError
from plait.run.hold.away.copies import copies_of
from plait.run.hold.state import ModelState
from plait.run.loop import together
from plait.run.verify import Verification, verify

pytestmark = pytest.mark.timeout(120)

REAL = ("resnet_bn", "gpt_dropout", "hf_gpt2", "lstm", "ignore_index", "contrastive")


@pytest.mark.parametrize("name", REAL)
def test_complaint_04_two_processes_compute_what_one_does(name: str) -> None:
    outcome = verify(ZOO[name].job(batch=7, steps=2, num_samples=14, optimizer="adamw"), "ddp", 2, steps=2)
    assert outcome.ok, outcome.first
    assert {difference.kind for difference in outcome.differences} >= {"loss", "gradient", "weight", "spread"}
    assert outcome.dtype == "float64"
    assert not outcome.serial
    assert ZOO[name].float32_inside == any("in float32" in notice for notice in outcome.notices)


def test_fp32() -> None:
    job = replace(ZOO["gpt_dropout"].job(batch=8, steps=2, optimizer="adamw"), clip_norm=0.5)
    outcome = verify(job, "ddp", 2, steps=2, fp32=True)
    assert outcome.ok, outcome.first
    assert "norm" in {difference.kind for difference in outcome.differences}
    assert outcome.dtype == "float32"
    assert any(difference.largest > 1e-12 for difference in outcome.differences)  # it was not float64


@pytest.mark.parametrize("ranks", [8, 64])
def test_many_ranks_in_one_process(ranks: int) -> None:
    outcome = verify(ZOO["mlp"].job(batch=67, steps=2, num_samples=80), "ddp", ranks, steps=2, serial=True)
    assert outcome.ok, outcome.first


def forget_last(tensors: Sequence[Tensor]) -> Tensor:
    """A reduction that loses the last rank's part."""
    return functools.reduce(torch.add, tensors[:-1]).clone()


def test_complaint_04_a_wrong_reduction_is_caught() -> None:
    outcome = verify(ZOO["mlp"].job(), "ddp", 2, serial=True, reduce=forget_last)
    assert not outcome.ok
    assert outcome.first is not None
    assert (outcome.first.kind, outcome.first.name) == (
        "loss",
        "step 1",
    )  # the first in the order of computation
    assert outcome.first.largest > outcome.first.tolerance
    assert {d.kind for d in outcome.differences if not d.ok} >= {"loss", "gradient", "weight"}


def test_a_gradient_that_is_reduced_wrongly_is_named() -> None:
    def double_the_large(tensors: Sequence[Tensor]) -> Tensor:
        total = functools.reduce(torch.add, tensors).clone()
        return total.index_fill(0, torch.tensor([0]), 0.0) if total.numel() > 100 else total

    outcome = verify(
        ZOO["mlp"].job(), "ddp", 2, serial=True, reduce=double_the_large, settings={"sync": {"bucket_mib": 0}}
    )
    assert outcome.first is not None
    assert outcome.first.kind == "gradient"
    assert "weight at step 1" in outcome.first.name


def test_reduce_is_for_the_serial_interpreter_only() -> None:
    with pytest.raises(UsageError, match="serial"):
        verify(ZOO["mlp"].job(), "ddp", 2, reduce=forget_last)


def test_complaint_25_local_batch_norm_is_reported() -> None:
    outcome = verify(ZOO["mlp"].job(model=norm_net, batch_norm="local"), "ddp", 2, serial=True)
    assert not outcome.ok
    assert any("batch_norm='local'" in notice for notice in outcome.notices)


# --- on the command line ------------------------------------------------------------------------------------


def test_the_command_exits_0_when_equal(capsys: pytest.CaptureFixture[str]) -> None:
    assert jobs.cli("verify", jobs.reference("dropout"), "--ranks", "2", "--steps", "2", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is True
    assert told["first"] is None
    assert told["mesh"] == {"data": 2}
    assert all(entry["ok"] for entry in told["differences"])


def test_the_command_exits_1_and_names_the_first_tensor(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(*arguments: Any, **options: Any) -> Verification:
        return verify(*arguments, **options, reduce=forget_last)

    monkeypatch.setattr("plait.run.verify.verify", faulty)
    assert jobs.cli("verify", jobs.reference("plain"), "--ranks", "8", "--serial") == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "not equal: one process / plan: the first tensor that differs is the loss step 1" in told
    assert "all ranks in one process" in told


# --- pairs of options ---------------------------------------------------------------------------------------

# An orthogonal array: every pair of values of every two options occurs.
ROWS = ("000000", "000111", "011001", "011110", "101010", "101101", "110011", "110100")
CHOICES: tuple[tuple[str, tuple[Any, Any]], ...] = (
    ("accumulate", (1, 3)),
    ("clip_norm", (None, 0.05)),
    ("precision", ("fp32", "bf16")),
    ("batch_norm", ("global", "local")),
    ("overlap", (True, False)),
    ("bucket_mib", (8.0, 0.0)),
)


def norm_net() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 24, bias=False), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 10))


def test_every_pair_of_options_occurs() -> None:
    for first in range(len(CHOICES)):
        for second in range(first):
            assert {(row[first], row[second]) for row in ROWS} == {
                ("0", "0"),
                ("0", "1"),
                ("1", "0"),
                ("1", "1"),
            }


@pytest.mark.parametrize("row", ROWS)
def test_complaint_07_every_pair_of_options_computes_the_same(row: str) -> None:
    chosen = {name: values[int(digit)] for (name, values), digit in zip(CHOICES, row, strict=True)}
    sync = {"overlap": chosen.pop("overlap"), "bucket_mib": chosen.pop("bucket_mib")}
    job = ZOO["mlp"].job(batch=14, steps=2, model=norm_net, data=unstack(vectors(28, 0)), **chosen)
    outcome = verify(
        job, "ddp", 2, steps=2, serial=True, fp32=job.precision == "bf16", settings={"sync": sync}
    )
    if job.batch_norm == "local":  # means something else on two ranks, and verify says so
        assert any("batch_norm='local'" in notice for notice in outcome.notices)
        job = replace(job, model=lambda: nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 10)))
        outcome = verify(
            job, "ddp", 2, steps=2, serial=True, fp32=job.precision == "bf16", settings={"sync": sync}
        )
    assert outcome.ok, outcome.first


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"batch": 1}, "batch=1 is smaller than ranks=2"),
        ({"batch": 8, "accumulate": 9}, "accumulate=9 is larger than batch=8"),
        ({"data": []}, "0 samples"),
        ({"data": jobs.samples(1)}, "fewer than ranks=2"),
    ],
)
def test_complaint_08_contradictions_are_told_before_anything_starts(
    change: dict[str, Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "plait.run.parent.ranks.launch", lambda *_, **__: pytest.fail("a process was started")
    )
    with pytest.raises(plait.PlaitError, match=told) as caught:
        plait.train(replace(jobs.plain(), **change), ranks=2, out=tmp_path / "run")
    assert caught.value.fix
    assert "\n" not in caught.value.what
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", ["powersgd", "topk"])
def test_compressed_gradients_in_processes_are_those_of_all_ranks_in_one(method: str) -> None:
    sync = {"compress": method, "compress_rank": 2, "compress_keep": 0.1}
    job = ZOO["mlp"].job(batch=7, steps=3, num_samples=14, optimizer="adamw")
    outcome = verify(job, "ddp", 2, settings={"sync": sync})
    assert outcome.ok, outcome.first
    assert any("lossy" in notice and "all ranks in one process" in notice for notice in outcome.notices)


def test_ranks_whose_copies_drift_apart_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def drifted(state: ModelState, rank: int) -> dict[str, Tensor]:
        return {name: tensor + rank * 1e-14 for name, tensor in copies_of(state, rank).items()}

    monkeypatch.setattr(together, "copies_of", drifted)  # forked ranks inherit it
    outcome = verify(ZOO["mlp"].job(), "ddp", 2, steps=1)
    assert [difference.kind for difference in outcome.differences if not difference.ok] == ["spread"]
