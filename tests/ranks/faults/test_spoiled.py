"""Flipped bits and bad losses: found, named, and the run goes back to what was good."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks import jobs

import plait
from plait.errors import SpoiledError, UsageError
from plait.program.instructions import Update
from plait.run.interpret.machine import Machine
from plait.run.interpret.step import Step

pytestmark = pytest.mark.timeout(120)


def job() -> plait.Job:
    return replace(jobs.plain(), epochs=None, steps=12, evaluate=None, metrics=None, until=None)


def after_update(monkeypatch: pytest.MonkeyPatch, step: int, action: Callable[[Machine], None]) -> None:
    exact = Machine._update

    def update(machine: Machine, now: Step, instruction: Update) -> None:
        exact(machine, now, instruction)
        if machine.step == step:
            action(machine)

    monkeypatch.setattr(Machine, "_update", update)


def flip_on(rank: int, marker: Path | None) -> Callable[[Machine], None]:
    """Flip the lowest bit of one weight on one rank, once."""

    def flip(machine: Machine) -> None:
        if machine.rank != rank or (marker is not None and marker.exists()):
            return
        if marker is not None:
            marker.touch()
        parameter = next(iter(machine.state.parameters.values()))
        parameter.detach().view(-1)[1:2].view(torch.int32).bitwise_xor_(1)

    return flip


def run(folder: Path, ranks: int, notices: list[str] | None = None, **limits: Any) -> plait.Result:
    told = notices if notices is not None else []
    return plait.train(
        job(),
        "ddp",
        ranks,
        out=folder,
        limits=plait.Limits(**limits),
        saving=plait.Saving(checkpoint_every=3, record_samples=True, trace=False),
        watching=plait.Watching(listener=lambda event: told.append(str(event.get("notice", "")))),
    )


def ids(folder: Path) -> list[Any]:
    return [json.loads(line)["ids"] for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_a_flipped_bit_is_named_and_the_run_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = run(tmp_path / "a", 3)
    after_update(monkeypatch, 7, flip_on(1, tmp_path / "flipped"))
    told: list[str] = []
    result = run(tmp_path / "b", 3, told, compare_every=4)
    name = next(name for name, _ in job().build_model().named_parameters())
    assert (tmp_path / "flipped").exists()
    found = [notice for notice in told if "goes back" in notice]
    assert len(found) == 1, told
    assert f"after step 8, rank 1 has other bits than ranks 0, 2 in {name!r}" in found[0]
    assert "step-00000006" in found[0] or "step-6" in found[0], found
    assert result.losses == undisturbed.losses  # bit for bit
    assert ids(tmp_path / "b") == ids(tmp_path / "a")
    assert all(torch.equal(result.weights[key], value) for key, value in undisturbed.weights.items())
    assert not (tmp_path / "b" / "failure.txt").exists()


def test_before_a_checkpoint_weights_are_compared_and_a_second_time_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    after_update(monkeypatch, 3, flip_on(1, None))
    with pytest.raises(
        SpoiledError, match="after step 6, ranks 0, 1 have different bits, and too few"
    ) as caught:
        run(tmp_path / "run", 2, compare_every=0)
    assert caught.value.step == 5
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if "3" in path.name]


class Spoiling(torch.utils.data.Dataset[Any]):
    """One sample makes the loss of its step infinite: always, or the first time that it is read."""

    def __init__(self, marker: Path | None) -> None:
        self._samples, self._marker = jobs.samples(64), marker

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        inputs, target = self._samples[index]
        if index != jobs.MARK or (self._marker is not None and self._marker.exists()):
            return inputs, target
        if self._marker is not None:
            self._marker.touch()
        return inputs * float("inf"), target


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_bad_loss_stops_goes_back_or_leaves_the_step_out(ranks: int, tmp_path: Path) -> None:
    def train(folder: str, marker: Path | None, policy: Any, told: list[str]) -> plait.Result:
        return plait.train(
            replace(job(), data=Spoiling(marker), shuffle=False, batch=8, steps=8),
            "ddp",
            ranks,
            out=tmp_path / folder,
            limits=plait.Limits(on_bad_loss=policy),
            saving=plait.Saving(checkpoint_every=2, record_samples=True, trace=False),
            watching=plait.Watching(listener=lambda event: told.append(str(event.get("notice", "")))),
        )

    with pytest.raises(SpoiledError, match=r"the loss is nan at step 6 .*\n.*--on-bad-loss") as caught:
        train("stop", None, "stop", [])
    assert caught.value.step == 5
    told: list[str] = []
    result = train("skip", None, "skip", told)
    assert len(result.losses) == 7
    assert any("step 6 is left out: its 8 samples" in notice for notice in told), told
    assert [n for line in ids(tmp_path / "skip") for n in line] == [n for n in range(64) if n // 8 != 5]
    told = []
    result = train("back", tmp_path / "read", "back", told)
    assert len(result.losses) == 8
    assert sum("goes back" in notice for notice in told) == 1
    with pytest.raises(SpoiledError):  # the same again
        train("again", None, "back", [])


@pytest.mark.parametrize("policy", ["back", "skip"])
def test_where_a_checkpoint_may_be_spoiled_too_nobody_goes_back(policy: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"--on-bad-loss {policy}: under server-sync"):
        plait.train(job(), "server-sync", 3, out=tmp_path / "run", limits=plait.Limits(on_bad_loss=policy))
    assert not (tmp_path / "run").exists()


def test_a_jump_of_the_loss_is_told(tmp_path: Path) -> None:
    samples = [
        (inputs * (1e3 if number >= 80 else 1), target)
        for number, (inputs, target) in enumerate(jobs.samples(96))
    ]
    jumping = replace(job(), data=samples, shuffle=False, batch=8, steps=12)
    with pytest.raises(SpoiledError, match=r"the loss jumped to .* at step 11 \(epoch 0\); lately it was"):
        plait.train(
            jumping,
            "single",
            out=tmp_path / "run",
            limits=plait.Limits(spike=10),
            saving=plait.Saving(trace=False),
        )


@pytest.mark.parametrize(
    ("plan", "mesh", "settings"),
    [("megatron", {"data": 2, "tensor": 2}, {}), ("zero1", {"data": 2}, {}),
     ("ddp", {"data": 2}, {"sync": {"compress": "topk"}}), ("1f1b", {"pipe": 2, "data": 2}, {})],
)  # fmt: skip
def test_replicas_stay_equal_under_other_plans(
    plan: str, mesh: dict[str, int], settings: dict[str, Any], tmp_path: Path
) -> None:
    result = plait.train(
        replace(job(), model=jobs.network),
        plan,
        changes=plait.Changes(mesh=mesh, settings=settings),
        steps=4,
        out=tmp_path / "run",
        saving=plait.Saving(trace=False),
        limits=plait.Limits(compare_every=1),
    )
    assert len(result.losses) == 4
