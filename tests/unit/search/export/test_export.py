"""Plans written for other systems: read back by those systems' own parsers where they are installed."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.tensor import DTensor

from plait.job.paper import TransformerShape, read_shape
from plait.plan.named import resolve
from plait.search.export import EXPORTERS, Setup


def setup(plan: str, mesh: dict[str, int], **given: Any) -> Setup:
    settings = given.pop("settings", {})
    values: dict[str, Any] = {
        "batch": 64,
        "micro_batch": 2,
        "hosts": 1,
        "precision": "bf16",
        "blocks": "blocks",
    }
    return Setup(plan=resolve(plan, None, settings, mesh), **(values | given))


def test_every_system_writes_a_plain_data_parallel_plan() -> None:
    for exporter in EXPORTERS.values():
        told = setup("zero2", {"data": 8})
        assert exporter.refusal(told) is None, exporter.name
        assert exporter.write(told).text


def test_refusals_name_what_is_in_the_way() -> None:
    piped = setup("zero-bubble", {"pipe": 4, "data": 2})
    assert EXPORTERS["torchtitan"].refusal(piped) is None
    for name, word in (("megatron", "zero-bubble"), ("deepspeed", "pipe=4"), ("fsdp2", "pipe=4")):
        assert word in (EXPORTERS[name].refusal(piped) or "")
    assert "zero-bubble" in (EXPORTERS["accelerate"].refusal(piped) or "")
    uneven = setup("1f1b", {"pipe": 5, "data": 1}, shape=read_shape("gpt2"))
    assert "12 layers" in (EXPORTERS["megatron"].refusal(uneven) or "")


def test_megatron_arguments() -> None:
    shape = read_shape("llama3-8b")
    assert isinstance(shape, TransformerShape)
    told = setup(
        "interleaved",
        {"pipe": 4, "data": 2, "tensor": 2},
        shape=shape,
        settings={"tensor": {"sequence": True}, "memory": {"zero": 1, "recompute": "full"}},
    )
    exported = EXPORTERS["megatron"].write(told)
    words = dict(line.partition(" ")[::2] for line in exported.text.splitlines() if not line.startswith("#"))
    assert words["--tensor-model-parallel-size"] == "2"
    assert words["--num-layers-per-virtual-pipeline-stage"] == "4"
    assert words["--recompute-granularity"] == "full"
    assert words["--num-query-groups"] == "8"
    assert {"--sequence-parallel", "--use-distributed-optimizer", "--swiglu", "--bf16"} <= set(words)


def test_torchtitan_counts_samples() -> None:
    told = setup("1f1b", {"pipe": 2, "data": 4, "tensor": 2}, settings={"memory": {"zero": 1}})
    values = tomllib.loads(EXPORTERS["torchtitan"].write(told).text)
    assert values["parallelism"]["data_parallel_shard_degree"] == 4
    assert values["parallelism"]["pipeline_parallel_schedule"] == "1F1B"
    assert values["training"]["local_batch_size"] * 4 == values["training"]["global_batch_size"] == 64
    flat = tomllib.loads(EXPORTERS["torchtitan"].write(setup("zero3", {"data": 8})).text)
    assert flat["training"]["local_batch_size"] == 2
    assert flat["parallelism"]["fsdp_reshard_after_forward"] == "always"


def test_deepspeed_batch_sizes_agree() -> None:
    values = json.loads(EXPORTERS["deepspeed"].write(setup("zero2", {"data": 4, "tensor": 2})).text)
    per_gpu, steps = values["train_micro_batch_size_per_gpu"], values["gradient_accumulation_steps"]
    assert per_gpu * steps * 4 == values["train_batch_size"] == 64
    assert values["zero_optimization"]["stage"] == 2
    assert values["tensor_parallel"]["autotp_size"] == 2


@pytest.mark.parametrize(
    ("plan", "mesh", "kind"),
    [
        ("ddp", {"data": 8}, "MULTI_GPU"),
        ("zero3", {"data": 4, "tensor": 2}, "FSDP"),
        ("1f1b", {"pipe": 2, "data": 2, "tensor": 2}, "MEGATRON_LM"),
    ],
)
def test_accelerate_reads_its_configuration(
    plan: str, mesh: dict[str, int], kind: str, tmp_path: Path
) -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args", reason="accelerate is absent")
    text = EXPORTERS["accelerate"].write(setup(plan, mesh)).text
    path = tmp_path / "accelerate.yaml"
    path.write_text(text)
    read = config_args.load_config_from_file(str(path))
    assert str(read.distributed_type).endswith(kind)
    assert read.num_processes == 8
    assert yaml.safe_load(text)["mixed_precision"] == read.mixed_precision == "bf16"


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(("plan", "recompute"), [("zero3", "selective"), ("zero2", "full"), ("ddp", "none")])
def test_fsdp2_module_runs(plan: str, recompute: str) -> None:
    """A step goes through and the weights are where the plan wants them; torch's DDP knows no fake group."""
    told = setup(plan, {"data": 2}, precision="fp32", settings={"memory": {"recompute": recompute}})
    names: dict[str, Any] = {}
    exec(compile(EXPORTERS["fsdp2"].write(told).text, "fsdp2_plan.py", "exec"), names)
    backend, ranks = ("gloo", 1) if plan == "ddp" else ("fake", 2)
    dist.init_process_group(backend, rank=0, world_size=ranks, store=HashStore())
    try:
        model = names["parallelize"](Blocks(), "cpu")
        model(torch.randn(names["MICRO_BATCH"], 8)).sum().backward()
        parameters = list(model.parameters())
        assert len(parameters) == 4
        assert all(isinstance(parameter, DTensor) == (plan != "ddp") for parameter in parameters)
        assert all(parameter.grad is not None for parameter in parameters)
    finally:
        dist.destroy_process_group()
