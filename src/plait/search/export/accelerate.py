"""The plan as a configuration of Hugging Face Accelerate: `accelerate launch --config_file FILE train.py`.

In: a setup. Out: YAML for DDP, FSDP2 (with tensor parallelism where asked) or, with stages, its Megatron-LM plugin.
"""

from typing import Any

import yaml

from plait.search.export.base import Exported, Exporter, Setup, recompute_of


def refusal(setup: Setup) -> str | None:
    """What Accelerate has no setting for."""
    schedule = setup.plan.pipe.schedule
    if setup.pipe > 1 and schedule != "1f1b":
        return f"accelerate's pipelines are megatron's 1f1b; the plan has {schedule}"
    if setup.pipe > 1 and setup.plan.memory.zero > 1:
        return f"accelerate's pipelines have zero 0 or 1; the plan has {setup.plan.memory.zero}"
    if setup.pipe == 1 and setup.tensor > 1 and setup.data > 1 and setup.plan.memory.zero == 0:
        return "accelerate does not combine replicas of the model with tensor parallelism; use zero1, 2 or 3"
    return None


def write(setup: Setup) -> Exported:
    """The YAML file."""
    notes = [f"in the script: Accelerator(gradient_accumulation_steps={setup.micro_batches})."]
    values: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "NO",
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": "bf16" if setup.precision == "bf16" else "no",
        "num_machines": setup.hosts,
        "num_processes": setup.plan.mesh.size,
        "rdzv_backend": "static" if setup.hosts == 1 else "c10d",
        "same_network": True,
        "use_cpu": False,
    }
    if setup.pipe > 1:
        values["distributed_type"] = "MEGATRON_LM"
        values["megatron_lm_config"] = _megatron(setup)
        notes[0] = f"in the script: a micro-batch is {setup.micro_batch} sample(s)."
    elif setup.plan.memory.zero or setup.tensor > 1:
        values["distributed_type"] = "FSDP"
        values["fsdp_config"] = _fsdp(setup)
        if setup.tensor > 1:
            values["parallelism_config"] = {
                "parallelism_config_dp_replicate_size": 1,
                "parallelism_config_dp_shard_size": setup.data,
                "parallelism_config_tp_size": setup.tensor,
                "parallelism_config_cp_size": 1,
            }
            notes.append(
                "accelerate cuts the weights of Hugging Face models that have a tensor-parallel plan."
            )
        if setup.plan.memory.zero == 1:
            notes.append("FSDP2 shards gradients where it shards optimizer state: zero1 is written as zero2.")
    elif setup.data > 1:
        values["distributed_type"] = "MULTI_GPU"
    return Exported(text=yaml.safe_dump(values, sort_keys=False), notes=tuple(notes))


def _fsdp(setup: Setup) -> dict[str, Any]:
    return {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": setup.plan.memory.zero == 3,
        "fsdp_activation_checkpointing": recompute_of(setup) != "none",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_offload_params": False,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }


def _megatron(setup: Setup) -> dict[str, Any]:
    recompute = recompute_of(setup)
    values: dict[str, Any] = {
        "megatron_lm_tp_degree": setup.tensor,
        "megatron_lm_pp_degree": setup.pipe,
        "megatron_lm_num_micro_batches": setup.micro_batches,
        "megatron_lm_sequence_parallelism": setup.plan.tensor.sequence and setup.tensor > 1,
        "megatron_lm_use_distributed_optimizer": setup.plan.memory.zero == 1,
        "megatron_lm_recompute_activations": recompute == "selective",
    }
    if recompute == "full":
        values |= {
            "megatron_lm_recompute_granularity": "full",
            "megatron_lm_recompute_method": "uniform",
            "megatron_lm_recompute_num_layers": 1,
        }
    return values


ACCELERATE = Exporter(name="accelerate", file_name="accelerate.yaml", refusal=refusal, write=write)
