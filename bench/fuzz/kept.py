"""What plait has written, broken: run folders, checkpoints, tries, and what hosts hand each other."""

import hashlib
import io
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console

from bench.fuzz.mutate import json_dump, mutated, with_bytes_changed, yaml_dump
from plait.api.trials.board import Board, Key, Outcome
from plait.api.trials.request import Request, claim
from plait.files.records import sealed
from plait.options import Changes, Tries
from plait.plan.named import resolve
from plait.report.page import page
from plait.report.record import read_run
from plait.report.summary import report_json
from plait.report.text import print_report
from plait.run.checkpoint.state import (
    TrainingState,
    check_same_options,
    collect_optimizer,
    restore_model,
    restore_optimizer,
)
from plait.run.checkpoint.store import load_checkpoint, save_checkpoint
from plait.trace.files import write_trace
from plait.trace.span import Span, Trace


def fuzz_run(folder: Path, rng: random.Random) -> None:
    """A run folder and its report, in all forms."""
    spans = [
        Span(rank=r, step=s, instruction=0, kind="forward", name="[/red]", lane="compute", start_s=s, end_s=s + 0.5)
        for r in (0, 1) for s in (0, 1, 2)
    ]  # fmt: skip
    write_trace(Trace(spans=tuple(spans), ranks=(0, 1)), folder)
    lines: list[dict[str, Any]] = [
        {"step": s, "epoch": 0, "loss": 1.0, "samples_per_s": 9.0, "step_s": 0.5} for s in range(4)
    ]
    lines.append({"step": 3, "epoch": 0, "evaluate": {"loss": 0.5, "accuracy": 0.9}})
    (folder / "metrics.jsonl").write_text("".join(sealed(line) for line in lines))
    (folder / "environment.json").write_text(
        json.dumps({"torch": "2", "first_step": 0, "job": "x.py", "settings": []})
    )
    totals = {
        "steps": 4,
        "workers": 2,
        "servers": 1,
        "updates": 8,
        "staleness": {"0": 3, "2": 1},
        "bytes_sent": {"0": 9},
    }
    (folder / "totals.json").write_text(
        json.dumps(totals | {"shares_by_worker": {"0": 4, "1": 4}, "gradient_bytes": 8})
    )
    (folder / "plan.yaml").write_text(resolve("ddp", 2).to_yaml())
    names = ("trace/rank0.json", "metrics.jsonl", "environment.json", "totals.json", "plan.yaml")
    path = folder / rng.choice(names)
    if path.suffix == ".jsonl":
        rows = path.read_bytes().splitlines()
        rows[rng.randrange(len(rows))] = mutated(json_dump(rng.choice(lines)), rng, json.loads, json_dump)
        path.write_bytes(b"\n".join(rows))
    elif path.suffix == ".yaml":
        path.write_bytes(mutated(path.read_bytes(), rng, yaml.safe_load, yaml_dump))
    else:
        path.write_bytes(mutated(path.read_bytes(), rng, json.loads, json_dump))
    print_report(folder, Console(file=io.StringIO(), width=100))
    page(read_run(folder))
    json.dumps(report_json(folder), allow_nan=False)


def fuzz_checkpoint(folder: Path, rng: random.Random) -> None:
    """A checkpoint, its sums computed anew after the change, so that the content is what is refused; what is read is
    taken over by a model and its optimizer."""
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.zeros(2))
    model.register_buffer("b", torch.ones(1))
    adam = torch.optim.Adam(model.parameters(), lr=0.1, betas=(0.9, 0.99))
    weights = {"w": torch.zeros(2), "b": torch.ones(1)}
    kept = collect_optimizer(adam, model.named_parameters())
    optimizer = replace(kept, tensors={"w": {"m": torch.ones(2)}}, values={"w": {"n": 1.0}})
    schedule = {"step": 3, "initial_rates": [0.1]}
    state = TrainingState(
        step=3, parameters={"w": weights["w"]}, buffers={"b": weights["b"]}, aliases={"v": "w"}, transient=("b",),
        optimizer=optimizer, schedule=schedule, extra={"seed": 1, "progress": {"best": 0.5}},
    )  # fmt: skip
    path = save_checkpoint(folder / "checkpoints", state)
    name = rng.choice(
        ("state.json", "state.json", "complete.json", "model.safetensors", "optimizer.safetensors")
    )
    if name.endswith(".json"):
        (path / name).write_bytes(mutated((path / name).read_bytes(), rng, json.loads, json_dump))
    else:
        (path / name).write_bytes(with_bytes_changed((path / name).read_bytes(), rng))
    if name != "complete.json":
        manifest = json.loads((path / "complete.json").read_bytes())
        content = (path / name).read_bytes()
        manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        (path / "complete.json").write_text(json.dumps(manifest))
    found = load_checkpoint(folder, on_notice=lambda text: None)
    restore_model(model, found)
    own = [dict(group) for group in adam.param_groups]
    restore_optimizer(adam, model.named_parameters(), found.optimizer)
    check_same_options(own, found.optimizer.groups, moved=("lr",) if rng.random() < 0.5 else ("lr", "betas"))


def fuzz_try(folder: Path, rng: random.Random) -> None:
    """The folder of trials that are gone on with."""
    request = Request(
        job="x.py:job", plan="ddp", ranks=2, changes=Changes(args={"lr": [0.1, 0.2]}), tries=Tries(folds=2), steps=3,
        device="cpu",
    )  # fmt: skip
    claim(folder / "try", request)
    results = folder / "try" / "results.jsonl"

    def board() -> Board:
        return Board(results, folds=2, rungs=1, mode="min", propose=lambda trial, scores, args: None)

    first = board()
    first.take(Key(trial=0, rung=0, fold=0), Outcome(score=0.5, steps=3, seconds=1.0))
    first.close()
    with results.open("a") as file:
        file.write(sealed({"trial": 0, "args": {"lr": 0.1}}))
    path = rng.choice((results, folder / "try" / "try.json"))
    if path == results:
        rows = [mutated(json_dump({k: v for k, v in json.loads(row).items() if k != "sum"}), rng, json.loads, json_dump)
                for row in path.read_bytes().splitlines()]  # fmt: skip
        path.write_bytes(b"\n".join(rows) + b"\n")
    else:
        path.write_bytes(mutated(path.read_bytes(), rng, json.loads, json_dump))
    claim(folder / "try", request)
    board().close()
