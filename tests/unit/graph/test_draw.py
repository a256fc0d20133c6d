"""The page of a graph: whole, offline, and safe whatever the names are."""

import functools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.zoo import ZOO
from torch import nn

from plait.graph.from_job import Captures
from plait.graph.graph import Graph
from plait.graph.show.draw import draw_html

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@functools.cache
def captured(name: str) -> Graph:
    return Captures(ZOO[name].job()).of_size(4)


def data_of(page: str) -> Any:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def test_the_page_asks_for_nothing_from_outside() -> None:
    page = draw_html(captured("gpt"), "a title")
    assert "Content-Security-Policy\" content=\"default-src 'none'" in page
    addresses = set(re.findall(r"https?://[^\s\"'`]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}, "only the name of SVG, which is never fetched"
    assert not re.search(r"<(link|img|iframe)\b|\bsrc=|@import|url\(", page)


def test_every_op_is_in_the_data_and_reads_earlier_ones() -> None:
    graph = captured("resnet_bn")
    data = data_of(draw_html(graph, "resnet"))
    names = {row[0] for row in data["ops"]}
    picks = {node.name for node in graph.ops() if node.name.startswith("getitem")}
    assert {node.name for node in graph.ops()} - picks <= names
    assert {f"update:{name}" for name in graph.gradients} <= names
    assert {"batch.0", "batch.1"} <= names
    for index, row in enumerate(data["ops"]):
        assert all(earlier < index for earlier in row[10])
    assert "3.norm1.running_mean" in data["results"].values()


def test_an_update_stands_with_the_op_that_reads_the_parameter() -> None:
    data = data_of(draw_html(captured("mlp"), "mlp"))
    strings = data["strings"]
    rows = {row[0]: row for row in data["ops"]}
    assert strings[rows["update:0.weight"][5]] == strings[rows["addmm"][5]]
    assert "0.weight" in [strings[index] for index in rows["addmm"][11]]


def test_names_cannot_break_out_of_the_page() -> None:
    evil = "</script><script>alert(1)</script>"

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(evil, nn.Linear(16, 10))

        def forward(self, x: Any) -> Any:
            return getattr(self, evil)(x)

    graph = Captures(ZOO["mlp"].job(model=Named)).of_size(4)
    page = draw_html(graph, evil)
    assert "<script>alert" not in page
    assert any(evil in text for text in data_of(page)["strings"])


@pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium or google-chrome on the path to run the page's script"
)
def test_the_script_draws_boxes_in_three_lanes(tmp_path: Path) -> None:
    page = tmp_path / "graph.html"
    page.write_text(draw_html(captured("gpt"), "gpt"), encoding="utf-8")
    assert CHROMIUM is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    done = subprocess.run(
        [
            CHROMIUM,
            *flags,
            "--window-size=1400,900",
            "--virtual-time-budget=2000",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    for lane in ("forward", "backward", "update"):
        assert re.search(rf'class="box (module|op) {lane}"', done.stdout), lane
    assert 'class="edge' in done.stdout
    assert "the whole step" in done.stdout
