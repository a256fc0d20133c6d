"""The plan as Python for torch's own FSDP2 and DDP: one function to call on the model.

In: a setup without tensor and pipe axes. Out: a module that runs under torchrun.
"""

from plait.search.export.base import Exported, Exporter, Setup, recompute_of

_HEAD = '''"""How to run the model with torch {what}: torchrun --nnodes {hosts} --nproc-per-node {local} train.py

    model = parallelize(model)      # before the optimizer is made
    a step is {micro_batches} micro-batch(es) of {micro_batch} sample(s) a rank; divide the loss by ACCUMULATE
"""

import torch
from torch import nn
{imports}

ACCUMULATE = {micro_batches}
MICRO_BATCH = {micro_batch}
'''

_BLOCKS = """

def blocks(model: nn.Module) -> nn.ModuleList:
    return model.get_submodule("{path}")
"""

_FULL = """

def recompute(model: nn.Module) -> None:
    for index, block in enumerate(blocks(model)):
        blocks(model)[index] = checkpoint_wrapper(block)
"""

_SELECTIVE = """

def _policy(context, op, *args, **kwargs):
    kept = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
    kept_name = "scaled_dot_product" in str(op)
    return CheckpointPolicy.MUST_SAVE if op in kept or kept_name else CheckpointPolicy.PREFER_RECOMPUTE


def recompute(model: nn.Module) -> None:
    for index, block in enumerate(blocks(model)):
        context = partial(create_selective_checkpoint_contexts, _policy)
        blocks(model)[index] = checkpoint_wrapper(block, context_fn=context)
"""

_CHECKPOINT = "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper"


def refusal(setup: Setup) -> str | None:
    """FSDP2 cuts nothing but the batch and what is held."""
    if setup.tensor > 1 or setup.pipe > 1:
        return f"fsdp2 has the axis data only; the plan has tensor={setup.tensor} and pipe={setup.pipe}"
    return None


def write(setup: Setup) -> Exported:
    """A Python module."""
    zero, recompute = setup.plan.memory.zero, recompute_of(setup)
    again = recompute != "none" and setup.blocks is not None
    notes = []
    imports = []
    if again and recompute == "selective":
        imports.append("from functools import partial")
    if again:
        imports.append(_CHECKPOINT)
    if zero:
        imports.append("from torch.distributed.device_mesh import init_device_mesh")
        imports.append("from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard")
    else:
        imports.append("from torch.nn.parallel import DistributedDataParallel")
    if again and recompute == "selective":
        imports.append(
            "from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts"
        )
    text = _HEAD.format(
        what="FSDP2" if zero else "DDP", hosts=setup.hosts, local=setup.data // setup.hosts,
        micro_batches=setup.micro_batches, micro_batch=setup.micro_batch, imports="\n".join(imports),
    )  # fmt: skip
    if setup.blocks is not None:
        text += _BLOCKS.format(path=setup.blocks)
    if again:
        text += _SELECTIVE if recompute == "selective" else _FULL
    text += _parallelize(setup, again)
    if zero == 1:
        notes.append("FSDP2 shards gradients where it shards optimizer state: zero1 is written as zero2.")
    if recompute != "none" and setup.blocks is None:
        notes.append("the model has no list of blocks: nothing is recomputed.")
    if not zero and setup.precision == "bf16":
        notes.append("run the forward under torch.autocast('cuda', torch.bfloat16).")
    return Exported(text=text, notes=tuple(notes))


def _parallelize(setup: Setup, again: bool) -> str:
    lines = ["", "", "def parallelize(model: nn.Module, device: str = 'cuda') -> nn.Module:"]
    if again:
        lines.append("    recompute(model)")
    if not setup.plan.memory.zero:
        return "\n".join([*lines, "    return DistributedDataParallel(model)", ""])
    lines.append(f'    mesh = init_device_mesh(device, ({setup.data},), mesh_dim_names=("data",))')
    if setup.precision == "bf16":
        lines.append(
            "    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
        )
    else:
        lines.append("    precision = MixedPrecisionPolicy()")
    drop = setup.plan.memory.zero == 3
    options = f"mesh=mesh, mp_policy=precision, reshard_after_forward={drop}"
    if setup.blocks is not None:
        lines += ["    for block in blocks(model):", f"        fully_shard(block, {options})"]
    lines += [f"    fully_shard(model, {options})", "    return model", ""]
    return "\n".join(lines)


FSDP2 = Exporter(name="fsdp2", file_name="fsdp2_plan.py", refusal=refusal, write=write)
