"""A page for every named plan, made when the site is built: what its own docstring says, what it decides, and a step of
it as the simulator has it.

In: nothing but the plans. Out: pages and pictures under plans/, which `docs/hook.py` hands to mkdocs as if they were
files. They cannot be out of date: nothing of them is written down.
"""

import inspect
from collections.abc import Iterator
from dataclasses import replace

import torch
from examples.lectures.pictures import timeline
from torch import Tensor, nn

import plait
from plait.cluster.parse import parse_cluster
from plait.graph.from_job import Captures
from plait.plan.named import NAMED
from plait.run.measure.predict import Predicted, predict_job
from plait.search.choose.candidates import relaxed
from plait.trace.span import Span, Trace
from plait.units import format_bytes, format_seconds

RANKS, MICRO_BATCHES, SAMPLES, POSITIONS, WIDTH, BLOCKS = 4, 4, 32, 1024, 512, 8
CLUSTER = "4xA100"
PIXELS = 800
"""Width of a timeline."""
FAMILIES = {
    "On one rank": ("single",),
    "The batch is cut": ("ddp", "threads", "zero1", "zero2", "zero3"),
    "Tensors are cut": ("megatron", "tensor", "domain"),
    "Layers are cut": ("naive", "gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-2", "pipedream"),
    "Workers do not wait": (
        "server-sync", "server-async", "server-stale", "hogwild", "easgd", "local-sgd", "diloco",
    ),
}  # fmt: skip
"""How the list of pages is ordered; a plan that nobody has put anywhere comes last."""
MORE = {
    "Tensors are cut": "placements.md",
    "Layers are cut": "pipelines.md",
    "Workers do not wait": "relaxed.md",
}
"""The guide of a family."""


class Block(nn.Module):
    """A transformer's MLP with its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return x + down


def job(accumulate: int) -> plait.Job:
    """What every page shows a step of."""
    x = torch.zeros(1, 1, 1).expand(SAMPLES, POSITIONS, WIDTH)
    return plait.Job(
        model=lambda: nn.Sequential(*(Block() for _ in range(BLOCKS))), data=(x, x), loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3), batch=SAMPLES, accumulate=accumulate,
        steps=1, precision="bf16",
    )  # fmt: skip


def predicted() -> Iterator[tuple[str, Predicted]]:
    """A step under every plan; pipelines cut it into micro-batches, the others do not need to."""
    cluster, captures = parse_cluster(CLUSTER), {count: Captures(job(count)) for count in (1, MICRO_BATCHES)}
    for name, make in NAMED.items():
        plan = make(1 if name == "single" else RANKS)
        count = MICRO_BATCHES if plan.num_stages > 1 else 1
        yield name, predict_job(captures[count].job, plan, cluster, captures=captures[count])


def pages() -> dict[str, str]:
    """By path: Markdown and SVG."""
    found = dict(predicted())
    made = {"plans/index.md": _index(found)}
    for name, one in found.items():
        step = max(span.step for span in one.trace.spans)
        made[f"plans/{name}.svg"] = timeline(
            f"{name}: one step, predicted on {CLUSTER}", _drawable(one.trace, step), step
        )
        made[f"plans/{name}.md"] = _page(name, one)
    return made


def _drawable(trace: Trace, step: int) -> Trace:
    """The step with spans of one kind that follow each other closer than can be seen as one: some have thousands."""
    spans = sorted((s for s in trace.spans if s.step == step), key=lambda s: (s.rank, s.lane, s.start_s))
    least_s = (max(s.end_s for s in spans) - min(s.start_s for s in spans)) / PIXELS
    joined: list[Span] = []
    for span in spans:
        last = joined[-1] if joined else None
        near = last is not None and (last.rank, last.lane, last.kind) == (span.rank, span.lane, span.kind)
        if last is not None and near and span.start_s - last.end_s < least_s > span.duration_s:
            joined[-1] = replace(last, end_s=max(last.end_s, span.end_s))
        else:
            joined.append(span)
    return replace(trace, spans=tuple(joined))


def families() -> dict[str, list[str]]:
    """Every plan in its family."""
    known = {name for names in FAMILIES.values() for name in names}
    found = {family: [name for name in names if name in NAMED] for family, names in FAMILIES.items()}
    rest = [name for name in NAMED if name not in known]
    return found | ({"Others": rest} if rest else {})


def _what(name: str) -> str:
    return inspect.getdoc(NAMED[name]) or ""


def _page(name: str, found: Predicted) -> str:
    one, plan, differs = found.prediction, found.prediction.plan, relaxed().get(name)
    family = next(family for family, names in families().items() if name in names)
    ranks = "" if name == "single" else f" --ranks {plan.ranks}"
    same = (
        f"**It does not compute what one process does**: {differs}. `plait verify` holds it against its own rule."
        if differs
        else "It computes what one process does, to rounding: `plait verify` shows it on your own model."
    )
    lines = [
        f"# {name}", "", _what(name), "", same, "", "```sh",
        f"plait run    job.py --plan {name}{ranks}", f"plait verify job.py --plan {name}{ranks} --serial",
        f"plait predict job.py --plan {name} --cluster 8xH100", "```", "",
        f"![A step of {name}]({name}.svg)", "",
        f"*{BLOCKS} blocks of a transformer's MLP, {WIDTH} wide, {SAMPLES} samples of {POSITIONS} positions, bf16, on "
        f"{CLUSTER}: {format_seconds(one.step_s)} a step, {format_bytes(one.memory.total)} on the fullest device, "
        f"{format_bytes(sum(one.sent_bytes.values()))} sent by a device. Drawn from the program that ranks would run.*",
        "", "## What it decides", "",
        "As a file for `--plan`; each line can be changed by `--set`, or in the file:", "",
        "```yaml", plan.to_yaml().strip(), "```", "",
    ]  # fmt: skip
    if family in MORE:
        lines += [f"More of this family: [{family.lower()}](../{MORE[family]}).", ""]
    return "\n".join(lines)


def _index(found: dict[str, Predicted]) -> str:
    lines = [
        "# Plans", "",
        f"Every plan takes the same job. The numbers are those of one step of a small model on {CLUSTER}, predicted; "
        "[choosing a plan](../planning.md) does that for yours.", "",
    ]  # fmt: skip
    for family, names in families().items():
        lines += [
            f"## {family}",
            "",
            "| plan | what it does | step | memory | sent |",
            "|---|---|---|---|---|",
        ]
        for name in names:
            one = found[name].prediction
            sent = sum(one.sent_bytes.values())
            cells = (
                f"[`{name}`]({name}.md)", _what(name).split("\n")[0], format_seconds(one.step_s),
                format_bytes(one.memory.total), format_bytes(sent) if sent else "–",
            )  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)
