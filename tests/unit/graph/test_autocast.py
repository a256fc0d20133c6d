"""bf16 by the op lists of the device that a step will run on."""

from dataclasses import replace

import pytest
import torch
from tests.zoo import ZOO
from torch import fx, nn

from plait.graph.from_job import Captures
from plait.job.job import Job
from plait.plan.named import resolve
from plait.run.proof.eager_run import run_eager
from plait.run.proof.serial_run import run_serially


class Mixed(nn.Module):
    """Layer norm, softmax and a power straight behind products: what CUDA's kernels take in one dtype alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(nn.functional.gelu(self.first(x)))
        return self.last(hidden.softmax(-1) + self.first(x) ** 2)


def job() -> Job:
    generator = torch.Generator().manual_seed(0)
    data = (torch.randn(12, 8, generator=generator), torch.randint(0, 4, (12,), generator=generator))
    return Job(
        model=Mixed, data=data, loss=nn.CrossEntropyLoss(), batch=6, steps=2, precision="bf16",
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )  # fmt: skip


def dtypes_of(nodes: list[fx.Node], op: str) -> set[torch.dtype]:
    """Of the floating inputs of an op."""
    return {
        arg.meta["val"].dtype
        for node in nodes
        if str(node.target).startswith(f"aten.{op}")
        for arg in node.all_input_nodes
        if arg.meta["val"].is_floating_point()
    }


def test_cuda_computes_norms_and_powers_in_float32() -> None:
    on_cuda = list(Captures(job(), device_type="cuda").of_size(6).graph.nodes)
    on_cpu = list(Captures(job()).of_size(6).graph.nodes)
    for op in ("native_layer_norm", "_softmax.default", "pow"):
        assert dtypes_of(on_cuda, op) == {torch.float32}, op
    assert dtypes_of(on_cpu, "native_layer_norm") == {torch.float32, torch.bfloat16}
    assert dtypes_of(on_cuda, "addmm") == dtypes_of(on_cpu, "addmm") == {torch.bfloat16}


def test_what_is_captured_for_cuda_is_compared_with_the_same_lists() -> None:
    given = job()
    captures = Captures(given, device_type="cuda")
    record = run_serially(given, resolve("single", 1), 2, torch.float32, captures=captures)
    eager = run_eager(given, 2, torch.float32, captures)
    assert record.losses == pytest.approx(eager.losses, rel=1e-6)


def test_layer_norms_of_hugging_face_for_cuda_are_in_one_dtype() -> None:
    bf16 = replace(ZOO["hf_bert"].job(4, 1), precision="bf16")
    nodes = list(Captures(bf16, device_type="cuda").of_size(4).graph.nodes)
    assert dtypes_of(nodes, "native_layer_norm") == {torch.float32}
