"""What was compiled is kept with its graph, and is not taken for another one."""

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


def test_graphs_whose_ops_make_other_shapes_are_not_the_same() -> None:
    assert _key(product((3, 3))) == _key(product((3, 3))) != _key(product((3, 4)))
