"""Published measurements: a file with anything in it is read to its end, and the bars hold on a part of the cases."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from plait.cli.main import app, call
from plait.search.published.case import Case, read_cases
from plait.search.published.compare import SourceSummary, summarize
from plait.search.published.predictor import Outcome, predict_cases
from plait.search.published.setup import UnclearError, setup_of

FILE = Path(__file__).parents[3] / "golden" / "published.jsonl"
"""A part of the public cases, chosen by hashes of their ids among a few shapes of models."""


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    cases, bad = read_cases(FILE.read_text().splitlines())
    assert not bad
    return predict_cases(cases)


def of(outcomes: list[Outcome], word: str) -> SourceSummary:
    return next(summary for summary in summarize(outcomes) if word in summary.source)


@pytest.mark.parametrize(
    ("source", "bar"),
    [("vTrain", 0.08), ("pipe = 1", 0.18), ("mosaicml", 0.08), ("Korthikanti", 0.04), ("Narayanan", 0.06)],
)
def test_step_times_meet_their_bars(outcomes: list[Outcome], source: str, bar: float) -> None:
    summary = of(outcomes, source)
    assert summary.errors["step"].median <= bar
    assert summary.naive is not None


def test_memory_is_close_and_tells_what_fails(outcomes: list[Outcome]) -> None:
    sweep = [of(outcomes, "pipe = 1"), of(outcomes, "pipe > 1")]
    assert sweep[0].errors["memory"].median <= 0.15
    assert sum(s.num_failed_rejected for s in sweep) >= 0.6 * sum(s.num_failed for s in sweep) > 0
    assert sweep[0].num_good_rejected == 0 and sweep[1].num_good_rejected <= 1 < sweep[1].num_good


def test_other_kinds_are_compared_or_skipped_with_a_reason(outcomes: list[Outcome]) -> None:
    assert of(outcomes, "Zero Bubble").errors["bubble"].median < 1e-3
    assert of(outcomes, "Korthikanti").errors["layer"].median < 0.1
    assert of(outcomes, "ml-engineering network").errors["bus"].count == 20
    skipped = {outcome.case.id: outcome.skipped for outcome in outcomes if outcome.skipped}
    assert skipped == {
        "hw-V100-SXM2": "a data sheet: nothing to predict",
        "ddp-resnext50_32x4d-1M-4G": "no model on paper is 'resnext50_32x4d'",
    }


def test_a_step_that_leaves_the_micro_batch_open_says_what_was_taken(outcomes: list[Outcome]) -> None:
    outcome = next(outcome for outcome in outcomes if outcome.case.id == "sc21-t1-1.7B")
    assert "micro_batch: the fastest of those that fit" in outcome.notes


LLAMA = {"arch": "Llama", "layers": 2, "hidden": 64, "heads": 4, "ffn": 128, "seq": 64, "vocab": 512}
BAD = [
    "{not json",
    "[1, 2]",
    '{"id": "x", "kind": "poem"}',
    '{"id": "y", "kind": "training_run", "model": 3}',
    json.dumps({"id": "no gpu", "kind": "training_run", "model": LLAMA, "measured": {"step_s": 1}}),
    json.dumps({"id": "arch", "kind": "training_run", "model": {"arch": "Mamba"}, "cluster": {"gpu": "A100"}}),
    json.dumps({"id": "layers", "kind": "training_run", "model": {"arch": "GPT"}, "cluster": {"gpu": "A100"}}),
    json.dumps({"id": "nothing", "kind": "pipeline_schedule", "measured": {"profiled_ms": None}}),
    json.dumps({"id": "table", "kind": "collective", "measured": {"busbw_gbs": "fast"}, "surprise": 1}),
    json.dumps({"id": "layer", "kind": "layer_time", "model": LLAMA, "cluster": {"gpu": "A100"},
                "plan": {"micro_batch": 1, "variant": "?"}}),
    json.dumps({"id": "heads", "kind": "training_run", "model": LLAMA | {"heads": 5}, "cluster": {"gpu": "H100"},
                "plan": {"micro_batch": 1}}),
    json.dumps({"id": "cut", "kind": "training_run", "model": LLAMA, "cluster": {"gpu": "H100", "gpus": 2},
                "plan": {"micro_batch": 1, "tensor": 16}, "measured": {"step_s": 1}}),
    json.dumps({"id": "good", "kind": "training_run", "model": LLAMA, "cluster": {"gpu": "H100", "gpus": 2},
                "plan": {"micro_batch": 1, "zero": "odd", "recompute": 7, "chunks": -1}, "measured": {"step_s": 1}}),
]  # fmt: skip


def test_a_file_of_nonsense_is_told_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_text("\n".join(BAD) + "\n\n")
    result = CliRunner().invoke(app, ["validate", str(path), "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert [line["line"] for line in told["bad_lines"]] == [1, 2, 3, 4]
    reasons = {case["id"]: case["skipped"] for case in told["cases"]}
    assert reasons.pop("good") is None
    assert all(reasons.values()), reasons
    assert "Mamba" in reasons["arch"].title() and "no layers" in reasons["layers"]
    assert next(case for case in told["cases"] if case["id"] == "table")["unknown_fields"] == ["surprise"]
    table = CliRunner().invoke(app, ["validate", str(path)])
    assert table.exit_code == 0 and "line 1: it is not JSON" in table.output


def test_a_file_that_is_not_there_or_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    for name in ("missing.jsonl", "empty.jsonl"):
        assert call(["validate", str(tmp_path / name)]) == 2
    (tmp_path / "nonsense.jsonl").write_text("plan: ddp\n")
    assert call(["validate", str(tmp_path / "nonsense.jsonl")]) == 1


def test_plans_are_read_as_they_are_written() -> None:
    case = Case(
        id="x", kind="training_run", source="s", model=LLAMA, measured={},
        cluster={"gpu": "A100-SXM-40GB", "gpus": 16, "gpus_per_node": 8, "inter": "8x200 Gb/s per node"},
        plan={"tensor": 2, "pipe": 2, "chunks": 2, "global_batch": 32, "grad_accum": 4, "recompute": "full"},
    )  # fmt: skip
    setup = setup_of(case)
    assert dict(setup.plan.mesh.axes) == {"pipe": 2, "data": 4, "tensor": 2}
    assert (setup.plan.pipe.schedule, setup.plan.pipe.per_rank) == ("interleaved", 2)
    assert (setup.batch, setup.micro_batches) == (32, (2,))
    assert setup.plan.memory.recompute == "full"
    assert setup.cluster.between.bandwidth == 25e9 and setup.cluster.device.name == "A100-40"
    with pytest.raises(UnclearError, match="needs 64 devices of 16"):
        setup_of(replace(case, plan={"data": 64, "micro_batch": 1}))
