"""What was compiled is kept with its graph, and is not taken for another one."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import fx

from plait.torch_private.inductor import Like, _key, compile_graph


def product(shape: tuple[int, int]) -> fx.GraphModule:
    graph = fx.Graph()
    given = graph.placeholder("given")
    made = graph.call_function(torch.ops.aten.mm.default, (given, given))
    made.meta["val"] = torch.empty(shape)
    graph.output((made,))
    return fx.GraphModule(torch.nn.Module(), graph)


@pytest.mark.timeout(200)
def test_graphs_are_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product needs no compiler of C++."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    given = torch.randn(3, 3)
    function = compile_graph(product((3, 3)), [Like.of(given)], {})
    torch.testing.assert_close(function([given.clone()])[0], given @ given)
    assert list((tmp_path / "fxgraph").rglob("*")), "Inductor did not keep it"


COMPILE = """
import torch
from tests.unit.program.segment.test_kept import sine
from plait.torch_private.inductor import Like, compile_graph
given = torch.ones(5)
compile_graph(sine(given), [Like.of(given)], {})([given])
"""
KILLED = """#!/bin/bash
for word in "$@"; do
  if [ "$before" = -o ]; then echo cut off > "$word"; [ -n "$LINKER_DIES" ] && kill -9 $PPID && sleep 1; fi
  before="$word"
done
exec g++ "$@"
"""
"""A compiler that begins to write; who called it is killed meanwhile."""


def sine(given: torch.Tensor) -> fx.GraphModule:
    graph = fx.Graph()
    made = graph.call_function(torch.ops.aten.sin.default, (graph.placeholder("given"),))
    made.meta["val"] = torch.empty_like(given)
    graph.output((made,))
    return fx.GraphModule(torch.nn.Module(), graph)


@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler (Debian: g++)")
def test_libraries_are_whole_or_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(KILLED)
    compiler.chmod(0o755)
    kept = tmp_path / "kept"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(kept))
    environment = {**os.environ, "CXX": str(compiler)}
    for dies in ("yes", ""):
        ended = subprocess.run(
            [sys.executable, "-c", COMPILE], env={**environment, "LINKER_DIES": dies}, timeout=200
        )
        assert ended.returncode == (-signal.SIGKILL if dies else 0)
        libraries = list(kept.rglob("*.so"))
        assert all(library.stat().st_size > 1000 for library in libraries)
    for library in libraries:
        library.write_text("cut off by another program")
    monkeypatch.setenv("CXX", str(compiler))
    given = torch.randn(5)
    function = compile_graph(sine(given), [Like.of(given)], {})
    torch.testing.assert_close(function([given.clone()])[0], given.sin())


def test_graphs_whose_ops_make_other_shapes_are_not_the_same() -> None:
    assert _key(product((3, 3))) == _key(product((3, 3))) != _key(product((3, 4)))
