"""Compilation behind the steps: what is wanted reaches another process, and nobody waits for that one."""

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from plait.program.segment import behind as module
from plait.program.segment.behind import Behind, Wanted
from plait.program.segment.graph_bytes import UnknownOpError, pack_graph, unpack_graph
from plait.torch_private.inductor import Like, compile_graph

CPU = torch.device("cpu")


def graph_of(*targets: Any) -> fx.GraphModule:
    graph = fx.Graph()
    value = graph.placeholder("given")
    for target in targets:
        value = graph.call_function(target, (value, value))
    graph.output((value,))
    return fx.GraphModule(torch.nn.Module(), graph)


def twice(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.stack([one, other]).sum(0)


def test_a_graph_is_the_same_after_it_was_bytes() -> None:
    graph = graph_of(torch.ops.aten.mm.default, torch.ops.aten.add.Tensor, twice)
    *_, node, output = graph.graph.nodes
    with graph.graph.inserting_before(output):
        pad = graph.graph.call_function(torch.ops.aten.constant_pad_nd.default, (node, [0, 1], 2.0))
    output.args = ((pad, [torch.float64, torch.device("cpu"), torch.contiguous_format]),)
    graph.recompile()
    found, others = unpack_graph(pack_graph(graph.graph, {"inputs": [Like.of(torch.ones(2, 3).t())]}))
    assert [n.format_node() for n in found.graph.nodes] == [n.format_node() for n in graph.graph.nodes]
    assert others["inputs"] == [Like((3, 2), (1, 3), torch.float32, CPU, 0)]
    given = torch.randn(3, 3)
    torch.testing.assert_close(found(given)[0], graph(given)[0])


def test_an_op_that_another_process_does_not_have_is_named() -> None:
    torch.library.define("plait_test_behind::own", "(Tensor a, Tensor b) -> Tensor")
    data = pack_graph(graph_of(torch.ops.plait_test_behind.own.default).graph, {})
    with pytest.raises(UnknownOpError, match="plait_tess_behind::own"):
        unpack_graph(data.replace(b"plait_test_behind", b"plait_tess_behind"))


def test_a_function_without_a_name_is_tried_by_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Behind(CPU, 1)
    monkeypatch.setattr(found, "_start", lambda: pytest.fail("there is nothing to ask"))
    wanted = found.want("key", "segment", graph_of(lambda a, b: a + b), [], 3)
    assert found.settled_until == 2
    assert found.hear() == [] and not wanted.is_kept and found.settled_until == float("inf")
    assert found.take(3) == [("key", wanted)] and found.num_waiting == 0


def test_where_there_is_no_room_for_a_process_the_rank_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Behind(torch.device("cuda", 0), 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 20, 1 << 34))
    wanted = found.want("key", "segment", graph_of(torch.ops.aten.mm.default), [], 0)
    found.hear()
    assert found.no_room is not None and "1.0 MiB" in found.no_room
    assert not wanted.is_kept and wanted.reason is None and found.settled_until == float("inf")


def until_settled(found: Behind) -> list[tuple[Wanted, float]]:
    heard, deadline = [], time.monotonic() + 240
    while found.settled_until != float("inf") and found.lost is None and time.monotonic() < deadline:
        heard += found.hear()
        time.sleep(0.05)
    return heard


@pytest.mark.timeout(280)
def test_what_is_compiled_there_is_found_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products alone, for which no compiler of C++ is needed; one op was never defined there."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.library.define("plait_test_behind::here", "(Tensor a, Tensor b) -> Tensor")
    like = [Like.of(torch.ones(3, 3))]
    found = Behind(CPU, 1)
    product = found.want("product", "product", graph_of(torch.ops.aten.mm.default), like, 0)
    own = found.want("own", "own", graph_of(torch.ops.plait_test_behind.here.default), like, 1)
    wrong = found.want("wrong", "wrong", graph_of(torch.ops.aten.bmm.default), like, 2)
    try:
        heard = until_settled(found)
        assert [wanted.name for wanted, _ in heard] == ["product", "wrong"] and heard[0][1] > 0
        assert product.is_kept and product.reason is None
        assert not own.is_kept and own.reason is None, "the rank has that op and tries"
        assert wrong.reason is not None
        assert [key for key, _ in found.take(1)] == ["product", "own"]
        counts = dict(module_counters())
        given = torch.randn(3, 3)
        function = compile_graph(product.graph, like, {})
        torch.testing.assert_close(function([given])[0], given @ given)
        assert module_counters()["fxgraph_cache_hit"] == counts.get("fxgraph_cache_hit", 0) + 1
        assert found._pid is not None
        os.kill(found._pid, signal.SIGKILL)
        found.want("more", "more", graph_of(torch.ops.aten.add.Tensor), like, 3)
        until_settled(found)
        assert found.lost is not None and "status -9" in found.lost
    finally:
        found.close()


def test_ranks_of_a_host_compile_a_graph_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes what nobody has claimed; what another has compiled is answered without a process."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    asked: list[tuple[str, str]] = []
    ranks = {name: Behind(CPU, 1) for name in ("first", "second", "third")}
    for name, rank in ranks.items():
        monkeypatch.setattr(rank, "_start", lambda: True)
        monkeypatch.setattr(rank, "_packed", partial(note, asked, name))
        monkeypatch.setattr(rank, "_read", lambda found: None)
        rank._line = rank._requests = os.open(os.devnull, os.O_WRONLY)
        for target in (torch.ops.aten.mm.default, torch.ops.aten.add.Tensor, torch.ops.aten.sub.Tensor):
            rank.want(target, str(target), graph_of(target), [], 0)
    for name in ("first", "second"):
        ranks[name].hear()
    assert asked == [
        ("first", "aten.mm.default"),
        ("first", "aten.add.Tensor"),
        ("second", "aten.sub.Tensor"),
    ]
    for wanted in [*ranks["first"]._asked, *ranks["second"]._asked]:
        assert wanted.claimed is not None
        wanted.claimed.release("2.5")
    heard = ranks["second"].hear()
    assert [(wanted.name, seconds) for wanted, seconds in heard] == [
        ("aten.mm.default", 2.5),
        ("aten.add.Tensor", 2.5),
    ]
    heard = ranks["third"].hear()
    assert len(heard) == 3 and all(wanted.is_kept and not seconds for wanted, seconds in heard), (
        "of an earlier run"
    )
    assert len(asked) == 3 and ranks["third"].settled_until == float("inf")


def note(asked: list[tuple[str, str]], name: str, wanted: Wanted, given: object) -> bytes:
    asked.append((name, wanted.name))
    return b""


def module_counters() -> dict[str, int]:
    from torch._dynamo.utils import counters

    return dict(counters["inductor"])


def test_the_process_is_started_once_something_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "start_program", lambda *_, **__: pytest.fail("nothing is wanted"))
    found = Behind(CPU, 1)
    assert found.hear() == [] and found.settled_until == float("inf")
    found.close()
