"""The table of docs/coverage.md, from the cache of a sweep.

    python -m bench.coverage_table runs/coverage.jsonl > table.md

In: the lines of `bench/coverage.py`. Out: Markdown: counts by library and plan against the bars, every miss with its
reason, and what could not be built by rule.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.coverage import LIBRARIES, read_cache
from bench.coverage_trial import EQUAL, PLANS

BARS = {"captured": 0.85, "single": 0.95, "ddp": 0.95, "zero3": 0.75, "1f1b": 0.75}
"""Shares of the cases that must be reached."""
_PATHS = re.compile(r"[^\s(]*/(site-packages|bench|src|tests)/")
_NAMES = re.compile(r"/tmp/\S*/?")


def reason(text: str) -> str:
    """Why, in a few words: without paths of a machine, and without what the error's name says already."""
    text = _NAMES.sub("", _PATHS.sub("", text))
    inner = re.search(r"\((\w+(?:Exception|Error)): ([^)]*)\)?(?:\.|; .*)?$", text)
    line = re.search(r"([\w/.]+\.py:\d+)", text)
    if inner:
        short = f"{inner[1]} {inner[2]}"
        return f"{short[:110]}, {line[1]}" if line else short[:110]
    return text[:170]


def counts(lines: Sequence[dict[str, Any]]) -> dict[str, int]:
    """How many are captured, and equal under each plan."""
    return {
        "captured": sum(bool(line["captured"]) for line in lines),
        **{plan: sum(line["plans"].get(plan) == EQUAL for line in lines) for plan in PLANS},
    }


def table(lines: Sequence[dict[str, Any]]) -> str:
    """All of it."""
    cases = [line for line in lines if "plans" in line]
    columns = ("captured", *PLANS)
    rows = ["| library | tried | built by rule | cases finished | " + " | ".join(columns) + " |"]
    rows.append("|---" * (4 + len(columns)) + "|")
    for library in (*LIBRARIES, ""):
        own = [line for line in lines if line["name"].startswith(f"{library}/") or not library]
        done = [line for line in own if "plans" in line]
        built = [line for line in own if "unbuildable" not in line]
        if not own:
            continue
        found = counts(done)
        shares = [f"{found[c]} ({found[c] / len(done):.0%})" if done else "0" for c in columns]
        rows.append(
            f"| {library or '**all**'} | {len(own)} | {len(built)} | {len(done)} | {' | '.join(shares)} |"
        )
    whole = counts(cases)
    rows.append("| bar | | | | " + " | ".join(f"{BARS[c]:.0%}" if c in BARS else "" for c in columns) + " |")
    assert cases or not whole["captured"]
    return "\n".join(rows)


def misses(lines: Sequence[dict[str, Any]]) -> str:
    """Every case that misses something."""
    rows = ["| case | what | plans | why |", "|---|---|---|---|"]
    for line in sorted(lines, key=lambda line: str(line["name"])):
        if "broken" in line:
            rows.append(f"| {line['name']} | not finished | all | {line['broken']} |")
        if "plans" not in line:
            continue
        if not line["captured"]:
            rows.append(f"| {line['name']} | not captured | | {_cell(line['why_not'])} |")
        by_reason: dict[str, list[str]] = {}
        for plan, outcome in line["plans"].items():
            inside = not line["captured"] and plan not in ("single", "ddp") and outcome.startswith("refused")
            if outcome != EQUAL and not inside:
                by_reason.setdefault(outcome, []).append(plan)
        for outcome, plans in by_reason.items():
            what, _, why = outcome.partition(": ")
            rows.append(f"| {line['name']} | {what} | {', '.join(plans)} | {_cell(why)} |")
    return "\n".join(rows)


def unbuilt(lines: Sequence[dict[str, Any]]) -> str:
    """What is no case, by reason."""
    found: dict[str, list[str]] = {}
    for line in lines:
        if "unbuildable" in line:
            last = line["unbuildable"].split("; ")[-1]
            why = last.partition(": ")[2] or last
            found.setdefault(_cell(why)[:90], []).append(line["name"])
    rows = ["| why | number | such as |", "|---|---|---|"]
    for why, names in sorted(found.items(), key=lambda item: -len(item[1])):
        rows.append(f"| {why} | {len(names)} | {', '.join(names[:3])} |")
    return "\n".join(rows)


def _cell(text: str) -> str:
    return reason(text).replace("|", "/").replace("\n", " ")


def main() -> int:
    lines = [line for path in sys.argv[1:] for line in read_cache(Path(path)).values()]
    print(table(lines), misses(lines), unbuilt(lines), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
