"""Files that people write, broken: plans, clusters, published measurements, settings; and weights that others wrote."""

import json
import random
from contextlib import suppress
from pathlib import Path

import torch
import yaml
from safetensors.torch import save_file
from torch import nn

from bench.fuzz.mutate import json_dump, mutated, with_bytes_changed, yaml_dump
from plait.api.inputs.settings import parse_settings
from plait.api.inputs.stored import stored_settings
from plait.cluster.files import read_cluster, write_cluster
from plait.cluster.parse import parse_cluster
from plait.errors import PlaitError
from plait.job.model.weights import load_weights
from plait.plan.named import resolve
from plait.search.published.case import read_case_file
from plait.search.published.predictor import predict_cases
from plait.search.published.setup import UnclearError, setup_of

CASES = Path(__file__).parents[2] / "tests" / "golden" / "published.jsonl"


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
    path.write_bytes(mutated(text.encode(), rng, yaml.safe_load, yaml_dump))
    resolve(path, None)


def fuzz_cluster(folder: Path, rng: random.Random) -> None:
    """A cluster file."""
    path = folder / "cluster.yaml"
    write_cluster(parse_cluster(rng.choice(("2x8xA100", "8xK80", "H100"))), path, {"load": 0.1})
    path.write_bytes(mutated(path.read_bytes(), rng, yaml.safe_load, yaml_dump))
    read_cluster(path)


_LINES = CASES.read_bytes().splitlines()


def fuzz_case(folder: Path, rng: random.Random) -> None:
    """Rows of published measurements; those that need no capture of a model are predicted too."""
    path = folder / "cases.jsonl"
    line = mutated(rng.choice(_LINES), rng, json.loads, json_dump)
    path.write_bytes(line + b"\n" + rng.choice(_LINES) + b"\n")
    cases, _ = read_case_file(path)
    predict_cases([case for case in cases if case.kind in ("collective", "pipeline_schedule", "hardware")])
    for case in cases:
        with suppress(UnclearError):
            setup_of(case)


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
    path.write_bytes(mutated(json_dump(content), rng, json.loads, json_dump))
    (folder / "plan.yaml").write_text(resolve("ddp", 2).to_yaml())
    value = mutated(b"[h.1, h.2]", rng, yaml.safe_load, yaml_dump).decode("utf-8", errors="surrogateescape")
    for read in (lambda: stored_settings(folder), lambda: parse_settings([f"pipe.cut={value}"])):
        try:
            read()
        except PlaitError:
            continue


def fuzz_weights(folder: Path, rng: random.Random) -> None:
    """Weights to begin with: a file of safetensors or of torch, or the index of one in parts."""
    model = nn.Linear(3, 2)
    state = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    match rng.randrange(3):
        case 0:
            path = folder / "model.safetensors"
            save_file(state, path)
            path.write_bytes(_with_header_changed(path.read_bytes(), rng))
        case 1:
            path = folder / "weights.pt"
            torch.save({"state_dict": {**state, **({3: 4} if rng.random() < 0.1 else {})}}, path)
            path.write_bytes(with_bytes_changed(path.read_bytes(), rng))
        case _:
            save_file(state, folder / "model-1.safetensors")
            path = folder / "model.safetensors.index.json"
            index = {"metadata": {}, "weight_map": dict.fromkeys(state, "model-1.safetensors")}
            path.write_bytes(mutated(json_dump(index), rng, json.loads, json_dump))
    load_weights(model, path)


def _with_header_changed(data: bytes, rng: random.Random) -> bytes:
    """A safetensors file whose header says something else, and mostly how long it is."""
    length = int.from_bytes(data[:8], "little")
    header = mutated(data[8 : 8 + length], rng, json.loads, json_dump)
    told = len(header) if rng.random() < 0.8 else rng.choice((0, 1, 10**6, 2**31, 2**63, 2**64 - 1))
    return told.to_bytes(8, "little") + header + data[8 + length :]
