"""The page of a try: its trials in a table, the best first, and how their evaluations went.

In: cells of the table, and points. Out: a document that opens offline.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from plait.report.charts import Line, Point, line_chart
from plait.report.page import document


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """The evaluations of one trial."""

    name: str
    """Of the trial."""
    points: Sequence[Point]
    """Step and score."""
    is_best: bool
    """Whether it is the winner."""


def tries_page(
    name: str,
    command: str | None,
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    metric: str,
    curves: Sequence[Curve],
) -> str:
    """The whole document."""
    lines = [
        Line(name=one.name, points=one.points, style="second dots" if one.is_best else "first")
        for one in sorted(curves, key=lambda one: one.is_best)
    ]
    head = "".join(f"<th scope='col'>{escape(cell)}</th>" for cell in heads)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    key = "<span class='key second'>the best</span><span class='key first'>others</span>"
    to_train = f"<p>To train the best on all of the data:</p><pre>{escape(command)}</pre>" if command else ""
    parts = [
        f"<section><h2>Trials</h2><div class='scroll'><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>{to_train}</section>",
        f"<section><h2>Evaluation {escape(metric)} {key}</h2>{line_chart(f'Evaluation {metric}', lines)}</section>",
    ]
    return document(f"plait try {name}", [f"{len(rows)} trials"], parts)
