"""The plan as DeepSpeed's JSON configuration.

In: a setup without stages. Out: batch sizes, ZeRO stage, precision, tensor parallelism. DeepSpeed's pipelines are
written in code (`PipelineModule`), so plans with stages are refused.
"""

import json
from typing import Any

from plait.search.export.base import Exported, Exporter, Setup, recompute_of


def refusal(setup: Setup) -> str | None:
    """What the JSON file cannot say."""
    if setup.pipe > 1:
        return f"deepspeed builds pipelines in code (PipelineModule); the plan has pipe={setup.pipe}"
    if setup.tensor > 1 and setup.plan.memory.zero == 3:
        return "deepspeed does not combine ZeRO 3 with tensor parallelism"
    return None


def write(setup: Setup) -> Exported:
    """The JSON file."""
    notes = []
    zero: dict[str, Any] = {"stage": setup.plan.memory.zero, "overlap_comm": setup.plan.sync.overlap}
    if setup.plan.sync.bucket_mib > 0:
        zero["reduce_bucket_size"] = int(setup.plan.sync.bucket_mib * 2**20 / 4)
    values: dict[str, Any] = {
        "train_batch_size": setup.batch,
        "train_micro_batch_size_per_gpu": setup.micro_batch,
        "gradient_accumulation_steps": setup.micro_batches,
        "zero_optimization": zero,
        "bf16": {"enabled": setup.precision == "bf16"},
    }
    if setup.plan.memory.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        notes.append("deepspeed updates on the host, after the backward: slower than the plan predicts.")
    if setup.tensor > 1:
        values["tensor_parallel"] = {"autotp_size": setup.tensor}
        if setup.plan.tensor.sequence:
            notes.append("deepspeed's tensor parallelism does not cut the sequence between layers.")
    if recompute_of(setup) != "none":
        values["activation_checkpointing"] = {"partition_activations": setup.tensor > 1}
        notes.append(
            "deepspeed recomputes where the model calls deepspeed.checkpointing, "
            f"or model.gradient_checkpointing_enable(); the plan has recompute={recompute_of(setup)}."
        )
    return Exported(text=json.dumps(values, indent=2) + "\n", notes=tuple(notes))


DEEPSPEED = Exporter(name="deepspeed", file_name="deepspeed.json", refusal=refusal, write=write)
