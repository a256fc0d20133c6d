"""What an exhibit shows: numbers of a run of this repository beside the lecture's, pictures, and what to make of them.

In: what an exhibit computed. Out: text for a terminal, a page of the documentation.
"""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch

LECTURES = {
    "000": "Neural Network Workflow Systems (CSE545, Stony Brook, 2023)",
    "001": "PyTorch (CS744, Wisconsin, 2024)",
    "002": "Data-Parallel Neural Networks (NHR summer school, 2023)",
    "003": "Dataflow graphs and parallelism (UC San Diego, 2024)",
    "004": "Deep Learning (IISc)",
}
"""The seeds, by number."""


@dataclass(frozen=True, kw_only=True)
class Number:
    """One number, beside the lecture's."""

    what: str
    ours: float | str
    """Of this run."""
    lecture: float | str | None = None
    """As printed there; None: the lecture gives none."""
    note: str = ""
    """Why they differ, where they do."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of one more table."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[float | str]]


@dataclass(frozen=True, kw_only=True)
class Exhibit:
    """One thing of a lecture, running."""

    lecture: str
    """A key of `LECTURES`."""
    title: str
    idea: str
    """What the lecture says, in a few sentences."""
    numbers: Sequence[Number] = ()
    tables: Sequence[Table] = ()
    pictures: Mapping[str, str] = field(default_factory=dict)
    """SVG by what it shows."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """What was printed, by title."""
    seen: str = ""
    """What the run showed, in a few sentences."""

    def number(self, what: str) -> float | str:
        """Ours, by its name."""
        return next(entry.ours for entry in self.numbers if entry.what == what)


def show(exhibit: Exhibit) -> None:
    """Print it; pictures are for the page."""
    print(f"lecture {exhibit.lecture}: {exhibit.title}\n\n{exhibit.idea.strip()}\n")
    for title, columns, rows in _tables(exhibit):
        print(f"{title}\n{_aligned([columns, *rows])}\n")
    for title, text in exhibit.texts.items():
        print(f"{title}\n{text.rstrip()}\n")
    print(exhibit.seen.strip())


def page(exhibit: Exhibit, module: str, seconds: float) -> tuple[str, dict[str, str]]:
    """Its page as Markdown, and the pictures to lay beside it, by file name."""
    name = module.rpartition(".")[2]
    lines = [f"# {exhibit.title}", "", f"Lecture {exhibit.lecture}, *{LECTURES[exhibit.lecture]}*.", ""]
    lines += [exhibit.idea.strip(), "", f"    python -m {module}", ""]
    pictures = {}
    for at, (title, svg) in enumerate(exhibit.pictures.items()):
        pictures[f"{name}_{at}.svg"] = svg
        lines += [f"![{title}]({name}_{at}.svg)", "", f"*{title}*", ""]
    for title, columns, rows in _tables(exhibit):
        lines += [f"**{title}**", "", _row(columns), _row(["---"] * len(columns)), *map(_row, rows), ""]
    for title, text in exhibit.texts.items():
        lines += [f"**{title}**", "", "```text", text.rstrip(), "```", ""]
    lines += [
        exhibit.seen.strip(),
        "",
        "---",
        "",
        f"*Made by the command above in {seconds:.0f} s: {made()}.*",
    ]
    return "\n".join(lines) + "\n", pictures


def made() -> str:
    """When, on what, by which versions."""
    processor = platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line
        ]
        processor = f"{len(names)} cores of {names[0]}" if names else processor
    day = datetime.now(UTC).strftime("%Y-%m-%d")
    return f"{day}, {processor}, torch {torch.__version__}, plait {version('plait')}"


def _tables(exhibit: Exhibit) -> list[tuple[str, Sequence[str], list[list[str]]]]:
    found: list[tuple[str, Sequence[str], list[list[str]]]] = []
    if exhibit.numbers:
        columns = ["what", "lecture", "here"]
        rows = [[entry.what, _cell(entry.lecture), _cell(entry.ours)] for entry in exhibit.numbers]
        if any(entry.note for entry in exhibit.numbers):
            columns.append("why")
            for row, entry in zip(rows, exhibit.numbers, strict=True):
                row.append(entry.note)
        found.append(("Numbers", columns, rows))
    found += [
        (table.title, table.columns, [[_cell(value) for value in row] for row in table.rows])
        for table in exhibit.tables
    ]
    return found


def _cell(value: float | str | None) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.5g}" if abs(value) < 1e5 else f"{value:,.0f}"
    return str(value)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return "\n".join(
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
