"""The plan as a job file of torchtitan: TOML, as its versions up to 0.2 take it.

In: a setup. Out: the sections `training`, `parallelism` and `activation_checkpoint`. Later versions take the same keys
on the command line (`--parallelism.tensor_parallel_degree 8`). torchtitan runs its own models; which one stays open.
"""

from typing import Any

from plait.search.export.base import Exported, Exporter, Setup, recompute_of

_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zero-bubble": "InterleavedZeroBubble",
}


def refusal(setup: Setup) -> str | None:
    """What torchtitan has no key for."""
    if setup.pipe > 1 and setup.plan.pipe.schedule not in _SCHEDULES:
        return (
            f"torchtitan has the schedules {', '.join(_SCHEDULES)}; the plan has {setup.plan.pipe.schedule}"
        )
    if setup.plan.memory.zero == 0 and setup.data > 1 and setup.tensor > 1:
        return "torchtitan does not combine replicas of the model with tensor parallelism; use zero1, 2 or 3"
    return None


def write(setup: Setup) -> Exported:
    """The TOML file."""
    plan, notes = setup.plan, ["[model] is left open: torchtitan runs the models that it has."]
    sharded = plan.memory.zero > 0
    parallelism: dict[str, Any] = {
        "data_parallel_replicate_degree": 1 if sharded else setup.data,
        "data_parallel_shard_degree": setup.data if sharded else 1,
        "tensor_parallel_degree": setup.tensor,
        "pipeline_parallel_degree": setup.pipe,
    }
    if sharded:
        parallelism["fsdp_reshard_after_forward"] = "always" if plan.memory.zero == 3 else "never"
    if plan.memory.zero == 1:
        notes.append(
            "torchtitan shards gradients where it shards optimizer state: zero1 is written as zero2."
        )
    # Without a pipeline torchtitan accumulates steps of local_batch_size; with one it cuts that into micro-batches.
    local = setup.micro_batch
    if setup.pipe > 1:
        parallelism["pipeline_parallel_schedule"] = _SCHEDULES[plan.pipe.schedule]
        parallelism["pipeline_parallel_microbatch_size"] = setup.micro_batch
        local = setup.micro_batch * setup.micro_batches
        if plan.pipe.schedule == "zero-bubble":
            notes.append("torchtitan's zero-bubble schedules have two stages a rank.")
    if setup.tensor > 1 and not plan.tensor.sequence:
        notes.append("torchtitan cuts the sequence between tensor-parallel layers; plait's plan does not.")
    training: dict[str, Any] = {"local_batch_size": local, "global_batch_size": setup.batch}
    if setup.shape is not None:
        training["seq_len"] = setup.shape.seq
    training["mixed_precision_param"] = "bfloat16" if setup.precision == "bf16" else "float32"
    sections = {
        "training": training,
        "parallelism": parallelism,
        "activation_checkpoint": {"mode": recompute_of(setup)},
    }
    text = "\n".join(_section(name, values) for name, values in sections.items())
    return Exported(text=text, notes=tuple(notes))


def _section(name: str, values: dict[str, Any]) -> str:
    lines = [f"[{name}]"]
    for key, value in values.items():
        lines.append(f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value}")
    return "\n".join(lines) + "\n"


TORCHTITAN = Exporter(name="torchtitan", file_name="torchtitan.toml", refusal=refusal, write=write)
