"""What a published case means in plait's words.

In: a `Case`. Out: a `Setup`: the model on paper, the cluster, the plan, and how the system that ran it works; or
`UnclearError` with the reason why it cannot be predicted. What a case does not say is filled in here, with a note.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from plait.cluster.cluster import Cluster, Device
from plait.cluster.presets import preset
from plait.errors import PlaitError
from plait.job.paper.shapes import Family, ImageShape, Shape, TransformerShape
from plait.plan.decisions import Memory, Pipe, Sync, Tensor
from plait.plan.mesh import Mesh
from plait.plan.plan import DATA, PIPE, TENSOR, Plan
from plait.search.predict.memory_rule import StateBytes
from plait.search.published.case import Case, number, whole
from plait.search.published.style import Style

MEGATRON = StateBytes(parameter=2, gradient=4, optimizer=12, reduced=2, gathered=2, update=30, accumulate=10)
"""Weights in 16 bits, gradients and masters in 32, one fused kernel for the update."""
NANOTRON = StateBytes(parameter=2, gradient=4, optimizer=12, reduced=4, gathered=2, update=100, accumulate=10)
"""The same, reduced in 32 bits; the update is a dozen kernels, each of which passes over some of the state."""
FSDP = StateBytes(parameter=4, gradient=4, optimizer=8, reduced=4, gathered=2, update=100, accumulate=12)
"""Masters in 32 bits are what is sharded; gathered in 16."""
DDP = StateBytes(parameter=4, gradient=4, optimizer=4, reduced=4, gathered=4, update=36, accumulate=12)
"""All in 32 bits, SGD with momentum."""
_PAD = 128
"""Megatron rounds the vocabulary up to this many words a rank."""


class UnclearError(Exception):
    """Why a case cannot be predicted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """A case that can be predicted."""

    shape: Shape
    cluster: Cluster
    plan: Plan
    batch: int
    micro_batches: tuple[int, ...]
    """Samples that a rank computes at once: what the case says, or what is tried where it says nothing."""
    style: Style
    state: StateBytes
    system: str
    """What ran it."""
    notes: tuple[str, ...]
    """What was filled in."""


def setup_of(case: Case) -> Setup:
    """The case in plait's words; raises `UnclearError`."""
    notes: list[str] = []
    system = _system(case)
    try:
        plan = _plan(case, notes)
        cluster = _cluster(case, plan)
        shape = _shape(case, system, plan)
    except PlaitError as error:
        raise UnclearError(str(error.what)) from error
    batch, micro = _batch(case, plan, notes)
    style = Style(half=True, fused=True, whole_blocks=True)
    if system == "megatron":
        style = replace(style, selective=("blocks.*.attend",), regathers=True)
    if system == "nanotron" and plan.memory.zero:  # gradients are reduced once the backward is done
        plan = replace(plan, sync=Sync(overlap=False))
    if isinstance(shape, ImageShape):
        style = Style()
    states = {"megatron": MEGATRON, "nanotron": NANOTRON, "fsdp": FSDP, "ddp": DDP}
    state = states[system]
    if case.plan.get("mixed_precision_mode") == "PURE":
        state = replace(state, reduced=2, parameter=2, gradient=2, optimizer=4)
    return Setup(
        shape=shape, cluster=cluster, plan=plan, batch=batch, micro_batches=micro, style=style, state=state,
        system=system, notes=tuple(notes),
    )  # fmt: skip


def _system(case: Case) -> str:
    arch, zero = str(case.model.get("arch", "")).lower(), str(case.plan.get("zero", ""))
    if "resn" in arch or "alexnet" in arch:
        return "ddp"
    if "3" in zero or "fsdp" in zero.lower():
        return "fsdp"
    return "nanotron" if "llama" in arch else "megatron"


def _plan(case: Case, notes: list[str]) -> Plan:
    given = case.plan
    tensor, pipe = whole(given.get("tensor"), 1) or 1, whole(given.get("pipe"), 1) or 1
    data = whole(given.get("data"))
    gpus = whole(case.cluster.get("gpus"))
    if data is None:
        data = max(1, (gpus or tensor * pipe) // (tensor * pipe))
        notes.append(f"data={data}")
    chunks = whole(given.get("chunks"), 1) or 1
    schedule = str(given.get("schedule") or "1f1b").lower()
    if "gpipe" in schedule:
        name, chunks = "gpipe", 1
    elif chunks > 1:
        name = "interleaved"
    else:
        name = "1f1b"
    return Plan(
        name="published",
        mesh=Mesh(axes=((PIPE, pipe), (DATA, data), (TENSOR, tensor))),
        memory=Memory(zero=_zero(given.get("zero")), recompute=_recompute(given, notes)),
        tensor=Tensor(sequence=bool(given.get("sequence_parallel")) and tensor > 1),
        pipe=Pipe(schedule=name, per_rank=chunks),
        sync=Sync(),
    )


def _zero(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return min(max(value, 0), 3)
    text = str(value or "").lower()
    digits = re.findall(r"zero-?([0-9])", text)
    return int(digits[0]) if digits and int(digits[0]) <= 3 else (3 if "fsdp" in text else 0)


def _recompute(given: Mapping[str, Any], notes: list[str]) -> str:
    value = given.get("recompute")
    if value is None:
        notes.append("recompute=none")
        return "none"
    text = str(value).lower()
    if text.startswith(("full", "true")):
        return "full"
    return "selective" if text.startswith("selective") else "none"


def _cluster(case: Case, plan: Plan) -> Cluster:
    given = case.cluster
    name = str(given.get("gpu", "")).upper()
    match = re.search(r"(V100|A100|H100|H200|B200|K80)", name)
    if match is None:
        raise UnclearError(f"no device is known for gpu={given.get('gpu')!r}")
    small = match.group(1) == "A100" and "40" in name.replace("A100", "")
    found = preset("A100-40" if small else match.group(1))
    ranks = plan.mesh.size
    gpus = whole(given.get("gpus"), ranks) or ranks
    if gpus < ranks:
        raise UnclearError(f"the plan needs {ranks} devices of {gpus}")
    per_host = whole(given.get("gpus_per_node"), found.devices_per_host) or found.devices_per_host
    per_host = min(per_host, ranks)
    cluster = found.cluster(str(given.get("name", name)), ceil(ranks / per_host), per_host)
    device = _device(cluster.device, given)
    between = _between(str(given.get("inter", "")), per_host)
    if between is not None:
        cluster = replace(cluster, between=replace(cluster.between, bandwidth=between))
    return replace(cluster, device=device)


def _device(device: Device, given: Mapping[str, Any]) -> Device:
    bandwidth, memory = number(given.get("hbm_gbs")), number(given.get("mem_gb"))
    if bandwidth is not None:
        device = replace(device, memory_bandwidth=bandwidth * 1e9)
    if memory is not None:
        device = replace(device, memory_bytes=int(memory * 1e9))
    return device


def _between(text: str, per_host: int) -> float | None:
    """Bytes per second of one device's way out of its host."""
    match = re.search(r"(?:([0-9]{1,4})x)?([0-9]{1,6}) Gb/s(.*)", text)
    if match is None:
        return None
    count, rate, rest = int(match.group(1) or 1), float(match.group(2)) / 8 * 1e9, match.group(3).lower()
    if "per gpu" in rest and match.group(1) is None:
        return rate
    return count * rate / per_host if "node" in rest or "machine" in rest else rate


def _shape(case: Case, system: str, plan: Plan) -> Shape:
    given = case.model
    arch = str(given.get("arch", "")).lower()
    if system == "ddp":
        layers = re.fullmatch(r"resnet(50|101|152)", arch)
        if layers is None and arch != "alexnet":
            raise UnclearError(f"no model on paper is {arch!r}")
        return (
            ImageShape(family="resnet", layers=int(layers.group(1)))
            if layers
            else ImageShape(family="alexnet")
        )
    family = next((f for names, f in _FAMILIES if any(n in arch for n in names)), None)
    if family is None:
        raise UnclearError(f"no model on paper is {arch!r}")
    needed = {name: whole(given.get(name)) for name in ("layers", "hidden", "heads", "seq")}
    lacking = [name for name, value in needed.items() if value is None]
    if lacking:
        raise UnclearError(f"the model has no {', '.join(lacking)}")
    for name, value in needed.items():
        if value is not None and value > _MOST[name]:
            raise UnclearError(f"{name}={value:,} is more than a model on paper may have ({_MOST[name]:,})")
    tensor = plan.mesh.size_of(TENSOR)
    words = min(whole(given.get("vocab"), 50257) or 50257, _MOST["seq"])
    plain = family == "gpt" and "flash" not in str(given.get("attention", "")).lower()
    return TransformerShape(
        family=family,
        kv_heads=whole(given.get("kv_heads"), 0) or 0,
        ffn=whole(given.get("ffn"), 0) or 0,
        vocab=ceil(words / (_PAD * tensor)) * _PAD * tensor,
        attention="plain" if plain else "fused",
        tied=bool(given.get("tied_embeddings", family != "llama")),
        dropout=0.1 if plain else 0.0,
        bias=plain,
        precision="fp32",
        **{name: value for name, value in needed.items() if value is not None},
    )


_MOST = {"layers": 2**12, "hidden": 2**20, "heads": 2**14, "seq": 2**24}
"""Of each number of a model: what is larger is a mistake in writing, and would take for ever."""
_MOST_MICRO_BATCHES = 2**14
"""Of a step that is believed: no published run has a tenth of it."""
_FAMILIES: tuple[tuple[tuple[str, ...], Family], ...] = (
    (("llama",), "llama"),
    (("gpt", "mpt", "opt", "bloom"), "gpt"),
    (("bert",), "bert"),
)


def _batch(case: Case, plan: Plan, notes: list[str]) -> tuple[int, tuple[int, ...]]:
    given = case.plan
    data = plan.data_ranks
    batch = whole(given.get("global_batch"))
    micro = whole(given.get("micro_batch"), whole(given.get("local_batch")))
    count = whole(given.get("grad_accum"), whole(given.get("micro_batches")))
    if batch is None and micro is not None and count is not None:
        batch = data * micro * count
    if micro is None and batch is not None and count is not None:
        micro = max(1, batch // (data * count))
    if batch is None and micro is not None:
        batch = data * micro * plan.mesh.size_of(PIPE)  # a full pipeline
        notes.append(f"global_batch={batch}")
    if batch is None:
        raise UnclearError("neither the batch nor the micro-batch is known")
    if batch // (data * (micro or 16)) > _MOST_MICRO_BATCHES:
        raise UnclearError(f"a batch of {batch:,} makes more than {_MOST_MICRO_BATCHES:,} micro-batches")
    if micro is not None:
        return batch, (micro,)
    most = max(1, batch // data)
    notes.append("micro_batch: the fastest of those that fit")
    return batch, tuple(size for size in (1, 2, 4, 8, 16) if size <= most and most % size == 0)
