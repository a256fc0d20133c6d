"""docs/placements.md is true: its examples of rules work, its pictures are those of today's programs."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from docs.pictures.hops import HOPS, draw_hops
from docs.pictures.models import PICTURES
from docs.pictures.scene import Bar, Row, make_scene
from docs.pictures.svg import draw
from docs.pictures.tensors import Tensor
from docs.pictures.timelines import TIMELINES
from tests.unit.program.one_op import one_op, run_on_ranks

from plait.plan.plan import parse_plan
from plait.program.local import lowering
from plait.program.place.placement import AxisShares, parse_strategy
from plait.program.place.propagate import candidates
from plait.program.place.rules import Op, base, products

DOCS = Path(__file__).parents[3] / "docs"
TEXT = (DOCS / "placements.md").read_text(encoding="utf-8")
aten = torch.ops.aten


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules and lowerings that are entered in a test do not outlive it."""
    monkeypatch.setattr(base, "_TABLE", dict(base._TABLE))
    monkeypatch.setattr(lowering, "_TABLE", dict(lowering._TABLE))
    monkeypatch.setattr(lowering, "_MEETS", set(lowering._MEETS))


def check(target: Any, args: tuple[Any, ...], num_strategies: int) -> None:
    """Every strategy of an op is right on unequal shares, and there are as many as the page says."""
    op = one_op(target, args)
    axis = AxisShares(name="data", units=(2, 0, 1, 3))
    whole = Op(op.node, axis).same(base.R)
    found = [strategy for strategy in candidates(Op(op.node, axis)) if strategy != whole]
    assert len(found) == num_strategies
    for strategy in found:
        for parts in run_on_ranks(op, strategy, axis):
            for part in parts:
                torch.testing.assert_close(part, op.expected[0], rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("tables")
def test_the_rule_of_the_page_is_right() -> None:
    assert base.find_rule(aten.linalg_cross.default) is None  # otherwise the page adds what is there
    exec(compile(blocks("python")[0], "placements.md", "exec"), {"__name__": "page"})
    numbers = torch.randn(2, 6, 12, 3, dtype=torch.float64)
    check(aten.linalg_cross.default, (numbers[0], numbers[1]), 4)


@pytest.mark.usefixtures("tables")
def test_the_local_form_of_the_page_is_right() -> None:
    assert base.find_rule(aten.dist.default) is None
    exec(compile(blocks("python")[1], "placements.md", "exec"), {"__name__": "page"})
    numbers = torch.randn(2, 6, 12, dtype=torch.float64)
    check(aten.dist.default, (numbers[0], numbers[1], 2), 2)


def test_the_strategies_of_a_product_are_those_of_the_page() -> None:
    op = one_op(aten.mm.default, (torch.ones(6, 6), torch.ones(6, 6)))
    listed = re.findall(r"^    ([RSP].*?-> \S+)", TEXT, re.MULTILINE)
    ours = products.mm(Op(op.node, AxisShares(name="tensor", units=(1, 1))))
    assert [parse_strategy(text) for text in listed] == ours


def test_the_placement_file_of_the_page_can_be_read() -> None:
    (text,) = blocks("yaml")
    (said,) = parse_plan(text).placements
    assert said.parameter("blocks.3.mlp.2.weight") == "S(1)"
    assert said.ops == (("forward _log_softmax 1", "R -> R"),)


def test_every_rule_file_is_in_the_table() -> None:
    source = Path(base.__file__).parent
    files = {path.name for path in source.glob("*.py")} - {"__init__.py", "base.py"}
    table = TEXT.partition("## Which file")[2].partition("## Adding a rule")[0]
    named = set(re.findall(r"`(\w+\.py)`", table))
    forms = {path.name for path in (source.parents[1] / "local" / "lowerings").glob("*.py")} - {
        "__init__.py",
        "own_shard.py",
    }
    assert named == files | forms


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_that_of_todays_program(name: str) -> None:
    assert f"pictures/{name}.svg" in TEXT
    again = draw(make_scene(PICTURES[name]))
    assert again == (DOCS / "pictures" / f"{name}.svg").read_text(encoding="utf-8"), (
        "the program has changed; if it is right: python -m docs.pictures"
    )


@pytest.mark.parametrize("name", HOPS)
def test_a_picture_of_hops_is_that_of_todays_program(name: str) -> None:
    assert f"pictures/{name}.svg" in (DOCS / "links.md").read_text(encoding="utf-8")
    assert draw_hops(name) == (DOCS / "pictures" / f"{name}.svg").read_text(encoding="utf-8")


def test_no_picture_is_left_over() -> None:
    assert {path.stem for path in (DOCS / "pictures").glob("*.svg")} == {*PICTURES, *TIMELINES, *HOPS}


def test_megatron_shows_where_the_sum_appears_and_where_it_is_formed() -> None:
    scene = make_scene(PICTURES["megatron"])
    product = next(
        index
        for index, part in enumerate(scene.parts)
        if isinstance(part, Row) and _names(part) == ["a", "W2", "y"]
    )
    row, bar = scene.parts[product], scene.parts[product + 1]
    assert isinstance(row, Row)
    a, w2, y = (item for item in row.items if isinstance(item, Tensor))
    assert [(t.text, t.is_sum) for t in (a, w2, y)] == [("S(1)", False), ("S(0)", False), ("P", True)]
    assert a.pieces == (((0, 0, 8, 4),), ((0, 4, 8, 4),))
    assert w2.pieces == (((0, 0, 4, 6),), ((4, 0, 4, 6),))
    assert isinstance(bar, Bar) and bar.collective == "all_reduce"
    assert [part.collective for part in scene.parts if isinstance(part, Bar)] == ["all_reduce"]


def test_zero3_shows_parts_that_make_a_whole() -> None:
    held = make_scene(PICTURES["zero3"]).parts[0]
    assert isinstance(held, Row)
    for item in held.items:
        assert isinstance(item, Tensor)
        covered = sum(rows * columns for piece in item.pieces for _, _, rows, columns in piece)
        assert covered == item.shape[0] * item.shape[1]


def _names(row: Row) -> list[str]:
    return [item.name for item in row.items if isinstance(item, Tensor)]
