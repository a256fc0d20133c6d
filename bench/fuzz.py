"""Files that are broken in every way that we can think of: each is read or refused, none ends in a traceback.

    python -m bench.fuzz [--cases 2000] [--seed 0] [plan cluster case run checkpoint environment]

Real files are mutated: bytes flipped, cut out and doubled; values replaced by others of other types, numbers that are
not finite, dates, deep nests, names that look like markup; references that grow exponentially. A reader may raise a
`PlaitError`, and must do so within seconds. The seed of every failure is printed.
"""

import argparse
import hashlib
import io
import json
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console

from plait.api.inputs.settings import parse_settings
from plait.api.inputs.stored import stored_settings
from plait.cluster.files import read_cluster, write_cluster
from plait.cluster.parse import parse_cluster
from plait.errors import PlaitError
from plait.files.records import sealed
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
from plait.search.published.case import read_case_file
from plait.search.published.predictor import predict_cases
from plait.search.published.setup import UnclearError, setup_of
from plait.trace.files import write_trace
from plait.trace.span import Span, Trace

CASES = Path(__file__).parents[1] / "tests" / "golden" / "published.jsonl"
NASTY: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**25, 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf"), "",
    " ", "²", "٣", "1e9", "0x1F", "2024-01-01", "12:30:45", "yes", "~", "[/red]", "[bold]x", "../../etc/passwd", "\x00",
    "x" * 5000, "\ud800", "🦆", [], {}, [[]], [1, "a", None], {"a": 1}, {"": {}}, {"²": "²"}, ["x"] * 300,
)  # fmt: skip
TOKENS = (
    b"[" * 5000, b"{" * 3000, b"{a: " * 2000, b"\xff\xfe", b"\x00", b"&a [*a]", b"!!python/object/apply:os.system [x]",
    b"<<: *x", b"? [a]\n: b\n", b"---\n", b"\t", b"NaN", b"Infinity", b"-.inf", b"1e999", b"9" * 5000, b"2024-01-01",
    b"\xc2\xb2", b"\r\n", b"'", b'"', b"#", b"%YAML 9.9\n", b"*", b"|\n", b"\xef\xbb\xbf", b"\xed\xa0\x80",
    b": ", b"- ",
)  # fmt: skip
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(20)
)
SECONDS = 20.0
"""No file may take longer, on a busy machine."""


def mutated(
    data: bytes, rng: random.Random, parse: Callable[[bytes], Any], dump: Callable[[Any], bytes]
) -> bytes:
    """The content after a few changes, of its values or of its bytes."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if rng.random() < 0.6:
            try:
                tree = parse(data)
                data = dump(_with_one_changed(tree, rng))
                continue
            except Exception:  # it is broken already, or what was put into it cannot be written
                pass
        data = _with_bytes_changed(data, rng)
    return data


def _with_one_changed(tree: Any, rng: random.Random) -> Any:
    """One value replaced, dropped, renamed or wrapped."""
    if rng.random() < 0.15 or not isinstance(tree, (dict, list)) or not tree:
        nasty = rng.choice(NASTY)
        return rng.choice((nasty, nasty, [tree], {"a": tree}, _nested(tree, rng.choice((20, 40, 200)))))
    keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
    key = rng.choice(keys)
    changed = dict(tree) if isinstance(tree, dict) else list(tree)
    how = rng.random()
    if how < 0.1:
        del changed[key]
    elif how < 0.2 and isinstance(changed, dict):
        changed[rng.choice((*(n for n in NASTY if isinstance(n, (str, int, float)) or n is None), "x"))] = (
            changed.pop(key)
        )
    elif how < 0.25 and isinstance(changed, list):
        changed += changed[:50]
    else:
        changed[key] = _with_one_changed(tree[key], rng)
    return changed


def _nested(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = [value]
    return value


def _with_bytes_changed(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    end = min(len(data), at + rng.choice((1, 2, 10, 100)))
    match rng.randrange(6):
        case 0:
            return data[:at] + bytes(rng.randrange(256) for _ in range(end - at)) + data[end:]
        case 1:
            return data[:at] + data[end:]
        case 2:
            return data[:at]
        case 3:
            return data[:end] + data[at:]
        case 4:
            return data[:at] + rng.choice(TOKENS) + data[at:]
        case _:
            return BOMB.encode() + data if rng.random() < 0.2 else data[:at] + rng.choice(TOKENS) + data[end:]


def _yaml_dump(tree: Any) -> bytes:
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True).encode()


def _json_dump(tree: Any) -> bytes:
    return json.dumps(tree).encode()


def fuzz_plan(folder: Path, rng: random.Random) -> None:
    """A plan file."""
    name = rng.choice(("ddp", "1f1b", "megatron", "server-stale", "diloco", "easgd", "zero3"))
    text = resolve(name, 4, {"memory": {"recompute": ["h.*.mlp"]}}).to_yaml()
    text += (
        "placements:\n  tensor:\n    parameters: {a: S(0)}\n    ops: {b: R -> S(1)}\n"
        if name == "megatron"
        else ""
    )
    path = folder / "plan.yaml"
    path.write_bytes(mutated(text.encode(), rng, yaml.safe_load, _yaml_dump))
    resolve(path, None)


def fuzz_cluster(folder: Path, rng: random.Random) -> None:
    """A cluster file."""
    path = folder / "cluster.yaml"
    write_cluster(parse_cluster(rng.choice(("2x8xA100", "8xK80", "H100"))), path, {"load": 0.1})
    path.write_bytes(mutated(path.read_bytes(), rng, yaml.safe_load, _yaml_dump))
    read_cluster(path)


_LINES = CASES.read_bytes().splitlines()


def fuzz_case(folder: Path, rng: random.Random) -> None:
    """Rows of published measurements; those that need no capture of a model are predicted too."""
    path = folder / "cases.jsonl"
    line = mutated(rng.choice(_LINES), rng, json.loads, _json_dump)
    path.write_bytes(line + b"\n" + rng.choice(_LINES) + b"\n")
    cases, _ = read_case_file(path)
    predict_cases([case for case in cases if case.kind in ("collective", "pipeline_schedule", "hardware")])
    for case in cases:
        with suppress(UnclearError):
            setup_of(case)


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
        rows[rng.randrange(len(rows))] = mutated(_json_dump(rng.choice(lines)), rng, json.loads, _json_dump)
        path.write_bytes(b"\n".join(rows))
    elif path.suffix == ".yaml":
        path.write_bytes(mutated(path.read_bytes(), rng, yaml.safe_load, _yaml_dump))
    else:
        path.write_bytes(mutated(path.read_bytes(), rng, json.loads, _json_dump))
    print_report(folder, Console(file=io.StringIO(), width=100))
    page(read_run(folder))
    json.dumps(report_json(folder), allow_nan=False)


def fuzz_environment(folder: Path, rng: random.Random) -> None:
    """What `--resume` takes from a folder, and values of `--set`."""
    content = {
        "job": "x.py:job",
        "settings": ["batch=4"],
        "steps": 3,
        "device": "cpu",
        "record_samples": True,
    }
    path = folder / "environment.json"
    path.write_bytes(mutated(_json_dump(content), rng, json.loads, _json_dump))
    (folder / "plan.yaml").write_text(resolve("ddp", 2).to_yaml())
    value = mutated(b"[h.1, h.2]", rng, yaml.safe_load, _yaml_dump).decode("utf-8", errors="surrogateescape")
    for read in (lambda: stored_settings(folder), lambda: parse_settings([f"pipe.cut={value}"])):
        try:
            read()
        except PlaitError:
            continue


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
        (path / name).write_bytes(mutated((path / name).read_bytes(), rng, json.loads, _json_dump))
    else:
        (path / name).write_bytes(_with_bytes_changed((path / name).read_bytes(), rng))
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


TARGETS: Mapping[str, Callable[[Path, random.Random], None]] = {
    "plan": fuzz_plan,
    "cluster": fuzz_cluster,
    "case": fuzz_case,
    "run": fuzz_run,
    "checkpoint": fuzz_checkpoint,
    "environment": fuzz_environment,
}


def attempt(target: str, seed: int, folder: Path) -> str:
    """`read` or `refused`; any other outcome is an exception, and a defect."""
    rng = random.Random(f"{target}-{seed}")
    began = time.monotonic()
    try:
        TARGETS[target](folder, rng)
        outcome = "read"
    except PlaitError as error:
        outcome = "refused" if error.what.strip() else "refused without a word"
    assert time.monotonic() - began < SECONDS, f"it took {time.monotonic() - began:.0f} s"
    return outcome


def main() -> None:
    """Try many cases of each kind of file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", help=", ".join(TARGETS))
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    failed = 0
    for target in given.targets or TARGETS:
        counts = {"read": 0, "refused": 0, "failed": 0}
        began = time.monotonic()
        for seed in range(given.seed, given.seed + given.cases):
            folder = Path(tempfile.mkdtemp(prefix="plait-fuzz-"))
            try:
                counts[attempt(target, seed, folder)] += 1
            except Exception:
                counts["failed"] += 1
                last = traceback.format_exc().strip().splitlines()
                print(
                    f"{target} seed {seed}: {last[-1][:200]}  <- {last[-3].strip()[:160] if len(last) > 3 else ''}"
                )
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        failed += counts["failed"]
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        told = ", ".join(f"{count} {name}" for name, count in counts.items())
        print(
            f"{target}: {told} of {given.cases} in {time.monotonic() - began:.0f} s; peak {peak_mib:.0f} MiB",
            flush=True,
        )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
