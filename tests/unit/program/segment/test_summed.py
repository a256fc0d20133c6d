"""What a GPU's compiler is given of norms, GELUs and heads: one op each, which computes what they did."""

import pytest
import torch
from tests.unit.program.segment.test_compiled import CPU, given_likes, inputs_of
from torch import nn

from plait.graph.from_job import Captures
from plait.graph.ops import summed
from plait.graph.ops.summed import GELU_GRADIENT, HEADS_BESIDE, NORM_GRADIENT
from plait.job.data.open import open_data
from plait.job.job import Job
from plait.plan.named import resolve
from plait.program.compile import compile_program
from plait.program.program import Segment
from plait.program.ranks import Settings
from plait.program.segment.standalone import graph_of

aten = torch.ops.aten


class Block(nn.Module):
    def __init__(self, approximate: str) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(16), nn.LayerNorm(16)])
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(approximate), nn.Linear(32, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(b, t, 3, 2, 8).permute(2, 0, 3, 1, 4)
        heads = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(heads.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.norms[1](x))


def backward_of(precision: str, approximate: str = "none", compile_: str = "on") -> Segment:
    data = (torch.randn(8, 5, 16), torch.randn(8, 5, 16))
    job = Job(
        model=lambda: nn.Sequential(nn.Linear(16, 16), *(Block(approximate) for _ in range(2)), nn.LayerNorm(16)),
        data=data, batch=4, steps=1, loss=nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        precision=precision,  # type: ignore[arg-type]
    )  # fmt: skip
    captures = Captures(job, open_data(job.data, job.collate), torch.float32, device_type="cuda")
    settings = Settings(clip_norm=None, batch_norm="global", device=CPU)
    plan = resolve("single", 1, {"compile": compile_}, None)
    program = compile_program({4: captures.of_size(4)}, plan, [4], settings)
    return next(entry for entry in program.classes[0].segments.values() if entry.phase == "backward")


def graphs_of(segment: Segment, monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """As a GPU's compiler is given it, without and with such ops; on processors."""
    found = []
    for has in (False, True):
        monkeypatch.setattr(summed, "has_kernels", lambda has=has: has)
        monkeypatch.setattr(summed, "FEWEST_COLUMNS", 16)
        graph = graph_of(segment, given_likes(segment), [], torch.device("cuda"))
        for node in graph.graph.nodes:
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": CPU}
        graph.recompile()
        found.append(graph)
    return found


def count(graph: torch.fx.GraphModule, *targets: object) -> list[int]:
    called = [node.target for node in graph.graph.nodes]
    return [called.count(target) for target in targets]


@pytest.mark.parametrize("precision", ["bf16", "bf16-weights"])
def test_one_op_computes_gradient_sum_and_rounding(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    segment = backward_of(precision)
    plain, fused = graphs_of(segment, monkeypatch)
    left = (aten.native_layer_norm_backward.default, aten.gelu_backward.default, aten.stack.default)
    assert count(plain, *left, NORM_GRADIENT, GELU_GRADIENT, HEADS_BESIDE) == [5, 2, 2, 0, 0, 0]
    assert count(fused, *left, NORM_GRADIENT, GELU_GRADIENT, HEADS_BESIDE) == [0, 0, 0, 5, 2, 2]
    assert count(fused, aten.sum.dim_IntList) == [0]
    torch.manual_seed(0)
    given = [torch.randn_like(entry) if entry.is_floating_point() else entry for entry in inputs_of(segment)]
    for ours, theirs in zip(fused(*given), plain(*given), strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape and ours.stride() == theirs.stride()
        # a unit of 16 bits more or less, in each of some tens of sums
        assert (ours.float() - theirs.float()).norm() < 2**-5 * theirs.float().norm()


def test_what_is_not_the_same_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    _, fused = graphs_of(backward_of("bf16", approximate="tanh"), monkeypatch)
    assert count(fused, aten.gelu_backward.default, GELU_GRADIENT) == [2, 0]
    _, fused = graphs_of(backward_of("fp32"), monkeypatch)
    assert count(fused, NORM_GRADIENT, GELU_GRADIENT, HEADS_BESIDE) == [0, 0, 0]


def test_processors_have_no_such_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summed, "has_kernels", lambda: True)
    segment = backward_of("bf16")
    graph = graph_of(segment, given_likes(segment), [], CPU)
    assert count(graph, NORM_GRADIENT, GELU_GRADIENT, HEADS_BESIDE) == [0, 0, 0]


def test_the_backward_widens_for_itself() -> None:
    """16 bits are kept where 32 would be; where nothing is compiled, a cast would be a kernel more."""
    dtypes: dict[str, list[torch.dtype]] = {}
    for how in ("on", "off"):
        segment = backward_of("bf16-weights", compile_=how)
        norms = [node for node in segment.nodes if node.target is aten.native_layer_norm_backward.default]
        dtypes[how] = []
        for node in norms:
            widened = node.args[1]
            assert isinstance(widened, torch.fx.Node) and widened.meta["val"].dtype == torch.float32
            kept = widened if widened.name in segment.inputs else widened.all_input_nodes[0]
            assert kept.name in segment.inputs
            dtypes[how].append(kept.meta["val"].dtype)
    assert dtypes == {"on": [torch.bfloat16] * 5, "off": [torch.float32] * 5}
