"""Compiled segments: they compute what plain ones do, are compiled once, and give way where they cannot be."""

import operator
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from plait.errors import PlanError
from plait.graph.from_job import Captures
from plait.graph.ops.product_into import WIDE_PRODUCT
from plait.job.data.open import open_data
from plait.job.job import Job
from plait.plan.named import resolve
from plait.program.compile import compile_program
from plait.program.program import Program, Segment
from plait.program.ranks import Settings
from plait.program.segment import compiled
from plait.program.segment.behind import Behind, Wanted
from plait.program.segment.codegen import make_segment
from plait.program.segment.compiled import CompiledSegments, compiled_where_it_pays, pays
from plait.program.segment.layers import pieces_of, text_of
from plait.program.segment.standalone import Given, find_wide, given_of, graph_of
from plait.run.proof.serial_run import run_serially
from plait.torch_private.inductor import InductorError, Like

CPU = torch.device("cpu")


def program_of(job: Job, compile_: str = "on") -> Program:
    captures = Captures(job, open_data(job.data, job.collate), torch.float32)
    settings = Settings(clip_norm=None, batch_norm="global", device=CPU)
    return compile_program(
        {4: captures.of_size(4)}, resolve("single", 1, {"compile": compile_}, None), [4], settings
    )


def twins() -> Job:
    data = (torch.randn(8, 6), torch.randint(0, 3, (8,)))
    return Job(
        model=lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)), data=data, batch=4, steps=1,
        loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )  # fmt: skip


def meta_of(segment: Segment, name: str) -> torch.Tensor:
    nodes = {node.name: node for one in segment.nodes for node in (one, *one.all_input_nodes)}
    return nodes[name].meta["val"]


def inputs_of(segment: Segment) -> list[torch.Tensor]:
    metas = [meta_of(segment, name) for name in segment.inputs]
    return [torch.ones(meta.shape, dtype=meta.dtype) for meta in metas]


def given_likes(segment: Segment) -> list[Given]:
    return [given_of(tensor) for tensor in inputs_of(segment)]


@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler (Debian: g++)")
def test_compiled_segments_compute_the_same() -> None:
    """Random numbers, sums over ranks and gradients written into buckets included; rounding may differ."""
    job = replace(twins(), batch=8, clip_norm=1.0, model=lambda: nn.Sequential(
        nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 3)
    ))  # fmt: skip
    plain, fast = (
        run_serially(job, resolve("ddp", 2, {"compile": how}, None), 2, torch.float64)
        for how in ("off", "on")
    )
    assert plain.losses == pytest.approx(fast.losses, rel=1e-9)
    for name_, weight in plain.weights.items():
        assert torch.allclose(weight, fast.weights[name_], rtol=0, atol=1e-9), name_


@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler (Debian: g++)")
def test_batch_norm_is_compiled_with_what_stands_around_it() -> None:
    data = (torch.randn(8, 1, 6, 6), torch.randint(0, 3, (8,)))
    job = replace(twins(), batch=8, data=data, model=lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4, affine=False), nn.Flatten(),
        nn.Linear(64, 3),
    ))  # fmt: skip
    plain, fast = (
        run_serially(job, resolve("single", 1, {"compile": how}, None), 2, torch.float64)
        for how in ("off", "on")
    )
    assert plain.losses == pytest.approx(fast.losses, rel=1e-9)
    for found, expected in ((fast.weights, plain.weights), (fast.buffers, plain.buffers)):
        assert all(
            torch.allclose(found[name], tensor, rtol=0, atol=1e-9) for name, tensor in expected.items()
        )


def test_a_segment_is_compiled_once_and_into_given_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor], *_: object) -> object:
        calls.append(len(inputs))
        return lambda args: graph(*args)

    monkeypatch.setattr(compiled, "compile_graph", count)
    entry = program_of(twins()).classes[0]
    runs = CompiledSegments(CPU)
    for segment in entry.segments.values():
        given = inputs_of(segment)
        memory = [torch.empty(meta_of(segment, segment.outputs[place]).shape) for place in segment.fillable]
        expected = segment.run(list(given), [None] * len(memory)) if memory else segment.run(list(given))
        for _ in range(2):
            found = runs.run_of(segment)(list(given), memory) if memory else runs.run_of(segment)(list(given))
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs)
        for place, tensor in zip(segment.fillable, memory, strict=True):
            assert found[place] is tensor
    assert len(calls) == len(entry.segments)


def test_layers_that_are_alike_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of a segment give what it gives, gradients in given memory included."""
    calls: list[int] = []

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor], *_: object) -> object:
        calls.append(len(inputs))
        return lambda args: graph(*args)

    monkeypatch.setattr(compiled, "compile_graph", count)
    block = lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.LayerNorm(6))  # noqa: E731
    job = replace(twins(), model=lambda: nn.Sequential(*(block() for _ in range(8)), nn.Linear(6, 3)))
    plain, fast = (
        run_serially(job, resolve("ddp", 2, {"compile": how}, None), 2, torch.float64)
        for how in ("off", "on")
    )
    assert plain.losses == fast.losses
    assert all(torch.equal(fast.weights[name], weight) for name, weight in plain.weights.items())
    assert len(calls) < 12, "of 20 pieces, forward and backward: first, middle and last ones differ"


def test_gradients_on_a_gpu_are_float32_as_the_product_leaves_them() -> None:
    segments = program_of(replace(twins(), precision="bf16")).classes[0].segments.values()
    segment = next(entry for entry in segments if entry.phase == "backward")
    graph = graph_of(segment, given_likes(segment), [], torch.device("cuda"))
    assert [node.target for node in graph.graph.nodes].count(WIDE_PRODUCT) == 2
    assert WIDE_PRODUCT not in [
        node.target for node in graph_of(segment, given_likes(segment), [], CPU).graph.nodes
    ]
    for node in graph.graph.nodes:
        node.kwargs = {**node.kwargs, "device": CPU} if "device" in node.kwargs else node.kwargs
    graph.recompile()
    given = inputs_of(segment)
    for ours, theirs in zip(graph(*given), segment.run(list(given)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=2**-7)


def test_what_cannot_be_compiled_runs_as_it_is_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise InductorError("no such op")

    monkeypatch.setattr(compiled, "compile_graph", refuse)
    told: list[str | None] = []
    segment = next(iter(program_of(twins()).classes[0].segments.values()))
    given = inputs_of(segment)
    runs = CompiledSegments(CPU, told=lambda name, seconds, reason: told.append(reason))
    found, plain = runs.run_of(segment)(list(given)), segment.run(list(given))
    assert told == ["no such op"]
    for ours, theirs in zip(found, plain, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_numbers_are_compiled_in_until_they_change_too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places on an axis of the mesh are the same in every step, for each rank."""
    calls: list[int] = []
    told: list[str | None] = []

    def count(graph: torch.fx.GraphModule, inputs: list[Like], *_: object) -> object:
        calls.append(len(inputs))
        return lambda args: graph(*args)

    monkeypatch.setattr(compiled, "compile_graph", count)
    graph = torch.fx.Graph()
    batch, place = graph.placeholder("batch"), graph.placeholder("place")
    part = graph.call_function(take_from, (batch, place))
    double = graph.call_function(torch.ops.aten.add.Tensor, (part, part))
    graph.output((double,))
    part.meta["val"] = double.meta["val"] = torch.empty(3)
    segment = make_segment("s", "forward", [part, double], ["batch", "place"], [double.name], CPU)
    runs = CompiledSegments(CPU, told=lambda name, seconds, reason: told.append(reason))
    given = torch.arange(40.0)
    for _ in range(2):
        for number in range(20):
            (found,) = runs.run_of(segment)([given, number])
            assert torch.equal(found, 2 * given[number : number + 3])
    assert calls == [1] * 8
    assert told == [None] * 8 + ["it takes numbers, or strides, that change from step to step"]


def test_strides_that_change_are_compiled_for_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was compiled reads memory as the first tensors lay in it: a transposed one would be read across."""
    strides: list[tuple[int, ...]] = []

    def read_memory(graph: torch.fx.GraphModule, inputs: list[Like], *_: object) -> object:
        strides.append(inputs[0].stride)
        return lambda args: graph(args[0].as_strided(inputs[0].shape, inputs[0].stride))

    monkeypatch.setattr(compiled, "compile_graph", read_memory)
    graph = torch.fx.Graph()
    double = graph.call_function(torch.ops.aten.mul.Tensor, (graph.placeholder("given"), 2))
    double.meta["val"] = torch.empty(3, 3)
    runs = CompiledSegments(CPU)
    segment = make_segment("s", "forward", [double], ["given"], [double.name], CPU)
    given = torch.randn(3, 3)
    for _ in range(2):
        for tensor in (given, given.t()):
            torch.testing.assert_close(runs.run_of(segment)([tensor])[0], 2 * tensor)
    assert strides == [(3, 1), (1, 3)]


@pytest.mark.parametrize("plan", ["zero3", "1f1b", "megatron"])
def test_every_segment_can_be_compiled(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that hand on all results of an op as one, and those of ranks that have a place on an axis."""
    handed: list[object] = []

    def check(graph: torch.fx.GraphModule, inputs: list[Like], *_: object) -> object:
        def run(args: list[Any]) -> Any:
            found = graph(*args)
            handed.extend((*args, *found))
            return found

        return run

    monkeypatch.setattr(compiled, "compile_graph", check)
    told: list[str] = []
    monkeypatch.setattr(
        compiled, "_untold", lambda name, _, reason: told.append(f"{name}: {reason}") if reason else None
    )
    job = replace(twins(), batch=8, model=lambda: nn.Sequential(
        nn.Embedding(8, 6), nn.LayerNorm(6), nn.Linear(6, 12), nn.GELU(), nn.Dropout(0.1), nn.Linear(12, 6),
        nn.LayerNorm(6), nn.Flatten(), nn.Linear(12, 3),
    ), data=(torch.randint(0, 8, (8, 2)), torch.randint(0, 3, (8,))))  # fmt: skip
    plain, fast = (
        run_serially(job, resolve(plan, 2, {"compile": how}, None), 2, torch.float64) for how in ("off", "on")
    )
    assert plain.losses == pytest.approx(fast.losses, rel=1e-12) and not told
    assert len(handed) > 10 and all(isinstance(value, torch.Tensor) for value in handed)


def test_results_that_are_one_are_taken_apart_and_put_together_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between a segment that makes a tuple, with a result that is not there, and one that reads it."""
    monkeypatch.setattr(compiled, "compile_graph", lambda graph, *_: lambda args: flat(graph(*args)))
    graph = torch.fx.Graph()
    given = graph.placeholder("given")
    three = graph.call_function(three_of, (given,))
    three.meta["val"] = (torch.empty(2), None, [torch.empty(2)])
    last = graph.call_function(operator.getitem, (three, 2))
    total = graph.call_function(add_all, (three, last))
    last.meta["val"], total.meta["val"] = [torch.empty(2)], torch.empty(2)
    runs = CompiledSegments(
        CPU, told=lambda name, seconds, reason: pytest.fail(f"{name}: {reason}") if reason else None
    )
    first = make_segment("first", "forward", [three], ["given"], [three.name], CPU)
    second = make_segment("second", "forward", [last, total], [three.name], [total.name], CPU)
    value = torch.tensor([1.0, 2.0])
    (handed,) = runs.run_of(first)([value])
    assert handed[1] is None and torch.equal(handed[2][0], 3 * value)
    assert torch.equal(runs.run_of(second)([handed])[0], 7 * value)


def flat(results: Sequence[Any]) -> Sequence[Any]:
    assert all(isinstance(value, torch.Tensor) for value in results), "Inductor takes tensors alone"
    return results


def three_of(tensor: torch.Tensor) -> tuple[torch.Tensor, None, list[torch.Tensor]]:
    return tensor, None, [3 * tensor]


def add_all(three: Any, last: Any) -> torch.Tensor:
    return three[0] + three[2][0] + last[0]


def take_from(tensor: torch.Tensor, first: int) -> torch.Tensor:
    return tensor.narrow(0, first, 3)


def test_a_lazy_conjugate_is_left_as_it_is() -> None:
    """Compiled code reads memory, which holds the other number."""
    told: list[str | None] = []
    graph = torch.fx.Graph()
    total = graph.call_function(torch.ops.aten.exp.default, (graph.placeholder("given"),))
    total.meta["val"] = torch.empty(1, dtype=torch.complex64)
    segment = make_segment("s", "forward", [total], ["given"], [total.name], CPU)
    runs = CompiledSegments(CPU, told=lambda name, seconds, reason: told.append(reason))
    given = torch.tensor([1 + 2j]).conj()
    assert torch.equal(runs.run_of(segment)([given])[0], given.resolve_conj().exp())
    assert told == ["it takes a tensor that is sparse, or conjugated or negated when it is read"]


def test_steps_run_as_written_until_what_was_compiled_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where two segments want the same; what cannot be compiled stays as it is."""
    ran: list[int] = []

    def count(graph: torch.fx.GraphModule, inputs: list[Like], *_: object) -> object:
        def run(args: list[Any]) -> Any:
            ran.append(1)
            return graph(*args)

        return run

    monkeypatch.setattr(compiled, "compile_graph", count)
    told: list[tuple[float, str | None]] = []
    behind = Behind(CPU, 1)
    answers: list[tuple[Wanted, float]] = []
    monkeypatch.setattr(behind, "hear", lambda: [answers.pop()] if answers else [])
    runs = CompiledSegments(
        CPU, told=lambda _, seconds, reason: told.append((seconds, reason)), behind=behind
    )
    entry = program_of(twins()).classes[0]
    segments = [*entry.segments.values(), *program_of(twins()).classes[0].segments.values()]
    expected = [run(segment, segment.run) for segment in segments]
    for _ in range(2):
        assert_same([run(segment, runs.run_of(segment)) for segment in segments], expected)
    assert not ran and behind.num_waiting == len(entry.segments)
    runs.step = 5
    for wanted in behind._wanted.values():
        wanted.is_kept = True
        answers.append((wanted, 2.0))
    refused = next(iter(behind._wanted.values()))
    refused.is_kept, refused.reason = False, "no such op"
    for _ in entry.segments:
        runs.hear()
    assert sorted(told, key=str) == [(2.0, "no such op"), *[(2.0, None)] * (len(entry.segments) - 1)]
    assert runs.take(-1) == 0 and runs.take(4) == len(entry.segments)
    assert_same([run(segment, runs.run_of(segment)) for segment in segments], expected)
    assert len(ran) == 2 * (len(entry.segments) - 1)
    counted = runs.counted()
    assert (counted["as_written"], counted["waiting"]) == (1, 0)
    assert counted["seconds"] == 2.0 * len(entry.segments), "to load is not to compile"


def run(segment: Segment, function: Callable[..., tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    memory = [torch.empty(meta_of(segment, segment.outputs[place]).shape) for place in segment.fillable]
    given = inputs_of(segment)
    return function(given, memory) if memory else function(given)


def assert_same(found: list[tuple[torch.Tensor, ...]], expected: list[tuple[torch.Tensor, ...]]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_who_cannot_change_between_steps_waits_for_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    program = program_of(twins(), "on")
    found = compiled_where_it_pays(program.plan, program, CPU)
    assert found is not None and found.behind is None, "what is verified is what is compiled"
    found = compiled_where_it_pays(program.plan, program, CPU, may_wait=True)
    assert found is not None and found.behind is not None
    found = compiled_where_it_pays(program_of(twins(), "before").plan, program, CPU, may_wait=True)
    assert found is not None and found.behind is None, "a run that is to be the same again"
    found = compiled_where_it_pays(program.plan, program, CPU, may_wait=True, since=7)
    assert found is not None and found.behind is None, "it goes on as it was"
    assert found.first_step == 7 and found.counted()["first_step"] == 7
    auto = program_of(twins(), "auto").plan
    assert compiled_where_it_pays(auto, program, CPU, 10, since=7) is None
    assert compiled_where_it_pays(auto, program, torch.device("cuda"), 10) is None
    assert compiled_where_it_pays(auto, program, torch.device("cuda"), 10, since=7) is not None
    monkeypatch.setattr(compiled, "pays", lambda *_: True)
    for graphs, waits in (("auto", False), ("on", False), ("off", True)):
        plan = replace(auto, graphs=graphs)  # type: ignore[arg-type]
        found = compiled_where_it_pays(plan, program, torch.device("cuda"), 10, may_wait=True)
        assert found is not None and (found.behind is not None) == waits, "graphs hold code as it was"


def test_a_program_for_all_sizes_is_told_of_once() -> None:
    told: list[str | None] = []
    runs = CompiledSegments(CPU, told=lambda name, seconds, reason: told.append(reason))
    for segment in program_of(twins()).classes[0].segments.values():
        runs.leave_out(segment)
    assert told == ["one program serves batches of all sizes, and runs as written"]


def test_auto_compiles_where_the_run_is_long_enough() -> None:
    program = program_of(twins(), "auto")
    plan = program.plan
    assert not pays(plan, program, CPU, 10**9)
    assert not pays(plan, program, torch.device("cuda"), None)
    assert not pays(plan, program, torch.device("cuda"), 10)
    assert pays(plan, program, torch.device("cuda"), 10**15)
    assert pays(program_of(twins(), "on").plan, program, CPU, 1)
    assert pays(program_of(twins(), "before").plan, program, CPU, 1)


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(PlanError, match="compile='maybe'"):
        resolve("ddp", 2, {"compile": "maybe"}, None)


def test_gradients_are_cast_in_the_piece_of_their_product() -> None:
    """Else a product cannot write float32 itself, and its result is read and written once more."""
    blocks = [nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(6)]
    given = replace(
        twins(), model=lambda: nn.Sequential(nn.Linear(6, 16), *blocks, nn.Linear(16, 3)), precision="bf16"
    )
    segments = program_of(given).classes[0].segments.values()
    backward = next(segment for segment in segments if "backward" in segment.name)
    pieces = pieces_of(backward, CPU)
    assert len(pieces) > 3 and len({text_of(piece) for piece in pieces}) <= len(pieces) // 2
    assert sorted(n.name for p in pieces for n in p.nodes) == sorted(n.name for n in backward.nodes)
    wide = [node for piece in pieces for node in find_wide(piece, {})]
    products = [node for node in backward.nodes if node.target is torch.ops.aten.mm.default]
    weights = [
        node
        for node in products
        if isinstance(a := node.args[0], torch.fx.Node) and "t.default" in str(a.target)
    ]
    assert len(wide) == len(weights) == 8
