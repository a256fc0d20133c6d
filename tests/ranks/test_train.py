"""Whole training runs on 1 to 4 real ranks: what comes back, what the folder holds, and that ranks change neither."""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks import jobs
from tests.zoo import ZOO
from torch import Tensor, nn

import plait
from plait.errors import JobError
from plait.run.proof.serial_run import run_serially

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("leaves_no_process")]

RANKS = (1, 2, 3, 4)
EQUAL = 1e-5
"""Between ranks, of fp32 losses after 14 steps of AdamW: sums are in another order."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, plait.Result]:
    """The same job on every number of ranks."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        ranks: plait.train(
            jobs.dropout(), ranks=ranks, out=folder / str(ranks), saving=plait.Saving(record_samples=True)
        )
        for ranks in RANKS
    }


def lines(result: plait.Result, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (result.folder / name).read_text().splitlines()]


@pytest.mark.parametrize("ranks", RANKS[1:])
def test_complaint_22_cpu_ranks_train_like_one_process(ranks: int, runs: dict[int, plait.Result]) -> None:
    one, several = runs[1], runs[ranks]
    assert len(one.losses) == 14  # 97 samples in steps of 15, twice
    assert several.losses == pytest.approx(one.losses, rel=EQUAL)
    for name, tensor in several.weights.items():
        torch.testing.assert_close(tensor, one.weights[name], rtol=1e-4, atol=1e-4, msg=name)
    assert several.stopped is None


@pytest.mark.parametrize("ranks", RANKS)
def test_complaint_06_the_learning_rate_of_a_step_does_not_depend_on_ranks(
    ranks: int, runs: dict[int, plait.Result]
) -> None:
    rates = [entry["lr"] for entry in lines(runs[ranks]) if "lr" in entry]
    assert rates == [0.02 * 0.95**step for step in range(14)]


@pytest.mark.parametrize("ranks", RANKS)
def test_every_sample_is_used_once_an_epoch_in_one_order(ranks: int, runs: dict[int, plait.Result]) -> None:
    steps = lines(runs[ranks], "samples.jsonl")
    assert [entry["step"] for entry in steps] == list(range(14))
    for epoch in (0, 1):
        ids = [index for entry in steps if entry["epoch"] == epoch for index in entry["ids"]]
        assert sorted(ids) == list(range(jobs.NUM_SAMPLES))
    assert steps == lines(runs[1], "samples.jsonl")


@pytest.mark.parametrize("ranks", RANKS)
def test_evaluation_counts_every_sample_once(ranks: int, runs: dict[int, plait.Result]) -> None:
    result = runs[ranks]
    model = jobs.network()
    model.load_state_dict(result.weights, strict=True)  # the user's own model takes the weights as they are
    model.eval()
    held_out = jobs.samples(31, seed=1)
    inputs, targets = (torch.stack(column) for column in zip(*held_out, strict=True))
    with torch.no_grad():
        output = model(inputs)
    accuracy = float((output.argmax(1) == targets).double().mean())
    assert result.evaluation["accuracy"] == pytest.approx(accuracy)
    assert result.evaluation["error"] == pytest.approx(1 - accuracy)
    assert result.evaluation["loss"] == pytest.approx(
        float(nn.functional.cross_entropy(output, targets)), rel=1e-5
    )
    measured = [entry for entry in lines(result) if "evaluate" in entry]
    assert [entry["step"] for entry in measured] == [6, 13]  # the end of each epoch


@pytest.mark.parametrize("ranks", RANKS)
def test_the_folder_holds_what_was_run(ranks: int, runs: dict[int, plait.Result]) -> None:
    folder = runs[ranks].folder
    names = {path.name for path in folder.iterdir()}
    assert {
        "plan.yaml",
        "environment.json",
        "metrics.jsonl",
        "samples.jsonl",
        "trace",
        "checkpoints",
    } <= names
    plan = plait.resolve(folder / "plan.yaml", ranks)
    assert plan.name == ("single" if ranks == 1 else "ddp")
    environment = json.loads((folder / "environment.json").read_text())
    assert (environment["ranks"], environment["batch"], environment["seed"]) == (ranks, 15, 0)
    assert environment["torch"] == torch.__version__
    steps = [entry for entry in lines(runs[ranks]) if "loss" in entry]
    assert [entry["step"] for entry in steps] == list(range(14))
    assert [entry["loss"] for entry in steps] == list(runs[ranks].losses)
    assert all(
        entry["samples_per_s"] > 0 and entry["memory_bytes"] > 0 and entry["grad_norm"] > 0 for entry in steps
    )
    events = json.loads((folder / "trace" / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "X"} == set(range(ranks))
    trace = plait.read_run(folder).trace
    assert trace is not None and trace.steps == tuple(range(14))  # the end of the data is no step


def test_bf16_trains_with_masters_in_fp32(tmp_path: Path) -> None:
    job = replace(jobs.plain(), precision="bf16")
    one = plait.train(job, ranks=1, out=tmp_path / "1")
    two = plait.train(job, ranks=2, out=tmp_path / "2")
    exact = plait.train(jobs.plain(), ranks=1, out=tmp_path / "fp32")
    assert one.losses != exact.losses
    assert one.losses == pytest.approx(exact.losses, rel=0.02)  # bf16 has 8 bits
    assert two.losses == pytest.approx(one.losses, rel=0.02)
    assert {tensor.dtype for tensor in two.weights.values()} == {torch.float32}


def test_until_a_target_is_reached(tmp_path: Path) -> None:
    until = plait.Until(metric="accuracy", target=0.5, mode="max")
    result = plait.train(replace(jobs.dropout(), epochs=50, until=until), ranks=2, out=tmp_path)
    assert result.evaluation["accuracy"] >= 0.5
    assert result.stopped is not None
    assert result.stopped.startswith("accuracy reached")
    accuracies = [entry["evaluate"]["accuracy"] for entry in lines(result) if "evaluate" in entry]
    assert all(accuracy < 0.5 for accuracy in accuracies[:-1])
    assert len(result.losses) == 7 * len(accuracies) < 7 * 50


def test_until_nothing_improves(tmp_path: Path) -> None:
    job = replace(
        jobs.dropout(), steps=100, epochs=None, schedule=lambda step: 0.0, until=plait.Until(patience=2)
    )
    result = plait.train(
        replace(job, evaluate_every=3, model=lambda: nn.Linear(16, 10)), ranks=2, out=tmp_path
    )
    assert len(result.losses) == 9  # the first evaluation is the best one, and two more are not better
    assert result.stopped is not None
    assert "has not improved" in result.stopped


def test_steps_override_the_job(tmp_path: Path) -> None:
    result = plait.train(jobs.plain(), ranks=2, steps=6, out=tmp_path)  # an epoch has 4
    assert len(result.losses) == 6


def test_a_model_instance_is_not_changed(tmp_path: Path) -> None:
    model = nn.Linear(16, 10)
    before = model.weight.detach().clone()
    result = plait.train(replace(jobs.plain(), model=model), ranks=2, out=tmp_path)
    assert torch.equal(model.weight, before)
    assert not torch.equal(result.weights["weight"], before)


# --- where the job is defined -------------------------------------------------------------------------------

SCRIPT = """
    import sys
    import torch
    from torch import nn
    import plait

    factor = 0.5

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 2)
        def forward(self, x):
            return self.inner(x) * factor

    def make(width):
        data = [(torch.full((4,), float(i)) / 10, torch.tensor(i % 2)) for i in range(width)]
        return plait.Job(model=lambda: Net(), data=lambda: data, loss=lambda o, t: nn.functional.cross_entropy(o, t),
                         optimizer=lambda p: torch.optim.SGD(p, lr=0.1), batch=4, epochs=2)

    result = plait.train(make(10), ranks=2, out=OUT)
    print("steps", len(result.losses), "last", result.losses[-1])
"""


def test_complaint_20_a_script_with_lambdas_in_main(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT).replace("OUT", "sys.argv[1]"))
    done = subprocess.run(
        [sys.executable, script, tmp_path / "run"], capture_output=True, text=True, timeout=90,
        env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("steps 6 last 0.")
    assert done.stdout.count("steps") == 1  # no worker ran the script again


def test_complaint_20_a_notebook_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cell = textwrap.dedent(SCRIPT).replace("OUT", repr(str(tmp_path / "run")))
    exec(compile(cell, "<cell>", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.startswith("steps 6 last 0.")


def test_complaint_20_fresh_interpreters_take_lambdas_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forked = plait.train(jobs.plain(), ranks=2, out=tmp_path / "forked")
    monkeypatch.setattr("plait.run.start.launch.choose_start", lambda start, threads: "spawn")
    spawned = plait.train(jobs.plain(), ranks=2, out=tmp_path / "spawned")
    assert spawned.losses == forked.losses


def test_train_wants_a_job() -> None:
    with pytest.raises(JobError, match="a plait.Job, or text that names one, was expected, not function"):
        plait.train(jobs.plain)  # type: ignore[arg-type]


# --- kinds of data ------------------------------------------------------------------------------------------


class MapStyle(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return jobs.samples(37)[index]


class Streamed(torch.utils.data.IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(jobs.samples(37))


def columns() -> tuple[Tensor, Tensor]:
    inputs, targets = (torch.stack(column) for column in zip(*jobs.samples(37), strict=True))
    return inputs, targets


def huggingface(folder: Path) -> Any:
    datasets = pytest.importorskip("datasets")
    inputs, targets = columns()
    return datasets.Dataset.from_dict({"x": inputs.tolist(), "y": targets.tolist()}).with_format("torch")


def parquet(folder: Path) -> Any:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    inputs, targets = columns()
    table = pa.table({"x": pa.array(inputs.tolist(), pa.list_(pa.float32())), "y": targets.tolist()})
    pq.write_table(table, folder / "data.parquet", row_group_size=10)
    return folder / "data.parquet"


PAIRS: dict[str, Callable[[Path], Any]] = {
    "map-style dataset": lambda folder: MapStyle(),
    "list": lambda folder: jobs.samples(37),
    "tensors": lambda folder: columns(),
    "iterable dataset": lambda folder: Streamed(),
    "generator function": lambda folder: lambda: (sample for sample in jobs.samples(37)),
}
NAMED: dict[str, Callable[[Path], Any]] = {
    "dict of tensors": lambda folder: dict(zip("xy", columns(), strict=True)),
    "hugging face": huggingface,
    "parquet": parquet,
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[float, ...]:
    """Losses of one process on a list."""
    job = replace(jobs.plain(), data=jobs.samples(37), shuffle=False, epochs=2)
    return plait.train(job, ranks=1, out=tmp_path_factory.mktemp("expected") / "run").losses


@pytest.mark.parametrize("kind", [*PAIRS, *NAMED])
def test_every_kind_of_data_gives_the_same_samples_to_two_ranks(
    kind: str, expected: tuple[float, ...], tmp_path: Path
) -> None:
    job = replace(jobs.plain(), shuffle=False, epochs=2)
    if kind in PAIRS:
        job = replace(job, data=PAIRS[kind](tmp_path))
    else:
        job = replace(
            job, data=NAMED[kind](tmp_path), loss=None,
            objective=lambda model, batch: nn.functional.cross_entropy(model(batch["x"]), batch["y"]),
        )  # fmt: skip
    losses = plait.train(job, ranks=2, out=tmp_path / "run").losses
    assert losses == pytest.approx(expected, rel=EQUAL)
    assert len(losses) == 6  # 37 samples in steps of 16, twice


# --- models that cannot be captured -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def eager_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, plait.Result]:
    """A model with data-dependent control flow: 9 samples in steps of 4, so the last step leaves ranks without any."""
    folder = tmp_path_factory.mktemp("eager")
    job = ZOO["branching"].job(batch=4, steps=6, num_samples=9, optimizer="adamw")
    return {ranks: plait.train(job, "ddp", ranks, out=folder / str(ranks)) for ranks in (1, 2, 3)}


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_uncapturable_model_is_trained_eagerly(ranks: int, eager_runs: dict[int, plait.Result]) -> None:
    assert eager_runs[ranks].losses == pytest.approx(eager_runs[1].losses, rel=EQUAL)
    for name, tensor in eager_runs[ranks].weights.items():
        torch.testing.assert_close(tensor, eager_runs[1].weights[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_line_that_stopped_capture_is_named(ranks: int, eager_runs: dict[int, plait.Result]) -> None:
    source = Path(sys.modules["tests.zoo"].__file__ or "")
    number = next(
        n for n, line in enumerate(source.read_text().splitlines(), 1) if "row[0].item() > 0" in line
    )
    assert any(f"zoo.py:{number}" in notice for notice in eager_runs[ranks].notices), eager_runs[
        ranks
    ].notices


class BranchingNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x.unflatten(1, (4, 4))).flatten(1)
        return self.head(-y if float(x.sum()) > 0 else y)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_buffers_of_an_uncapturable_model_stay_equal_on_all_ranks(accumulate: int) -> None:
    data = ZOO["mlp"].job(batch=8, steps=3).data
    job = replace(jobs.plain(), model=BranchingNorm, data=data[:20], batch=8, accumulate=accumulate)
    record = run_serially(job, plait.resolve("ddp", 2), 3, torch.float64)
    assert record.spread == 0.0
    assert float(record.buffers["norm.running_mean"].abs().sum()) > 0
    assert any("its own share alone" in notice for notice in record.notices)


def test_ranks_without_samples_keep_the_buffers_of_the_others() -> None:
    data = ZOO["mlp"].job(batch=8, steps=3).data
    job = replace(jobs.plain(), model=BranchingNorm, data=data[:10], batch=8, epochs=None, steps=4)
    record = run_serially(
        job, plait.resolve("ddp", 3), 4, torch.float64
    )  # the second step has 2 samples: 1, 1, 0
    assert record.spread == 0.0
