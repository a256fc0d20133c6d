"""The plan as arguments of Megatron-LM's training scripts, one a line.

In: a setup. Out: text for `torchrun ... pretrain_gpt.py $(grep -v '^#' FILE)`. The model's own numbers are written
where it is one on paper.
"""

from plait.job.paper.shapes import TransformerShape
from plait.search.export.base import Exported, Exporter, Setup, recompute_of

_SHARDING = {2: "optim_grads", 3: "optim_grads_params"}


def refusal(setup: Setup) -> str | None:
    """What Megatron-LM has no argument for."""
    schedule = setup.plan.pipe.schedule
    if setup.pipe > 1 and schedule not in ("1f1b", "interleaved"):
        return f"megatron has the schedules 1f1b and interleaved; the plan has {schedule}"
    if setup.pipe > 1 and schedule == "interleaved":
        if setup.shape is None:
            return "megatron's interleaving is given in layers a stage, and this model's layers are not known"
        if setup.shape.layers % (setup.pipe * setup.plan.pipe.per_rank):
            stages = setup.pipe * setup.plan.pipe.per_rank
            return f"megatron cuts evenly; {setup.shape.layers} layers do not divide over {stages} stages"
    if setup.pipe > 1 and setup.shape is not None and setup.shape.layers % setup.pipe:
        return f"megatron cuts evenly; {setup.shape.layers} layers do not divide over {setup.pipe} stages"
    return None


def write(setup: Setup) -> Exported:
    """One argument with its value a line."""
    plan = setup.plan
    lines = [
        f"# world size {plan.mesh.size}: data={setup.data}, tensor={setup.tensor}, pipe={setup.pipe}",
        f"--tensor-model-parallel-size {setup.tensor}",
        f"--pipeline-model-parallel-size {setup.pipe}",
        f"--micro-batch-size {setup.micro_batch}",
        f"--global-batch-size {setup.batch}",
    ]
    notes = []
    if setup.pipe > 1 and plan.pipe.schedule == "interleaved" and setup.shape is not None:
        layers = setup.shape.layers // (setup.pipe * plan.pipe.per_rank)
        lines.append(f"--num-layers-per-virtual-pipeline-stage {layers}")
    if setup.tensor > 1 and plan.tensor.sequence:
        lines.append("--sequence-parallel")
    if plan.memory.zero:
        lines.append("--use-distributed-optimizer")
    if plan.memory.zero in _SHARDING:
        lines += [
            "--use-megatron-fsdp",
            f"--data-parallel-sharding-strategy {_SHARDING[plan.memory.zero]}",
            "--no-gradient-accumulation-fusion",
            "--ckpt-format fsdp_dtensor",
        ]
    recompute = recompute_of(setup)
    if recompute == "full":
        lines += ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
    elif recompute == "selective":
        lines.append("--recompute-activations")
        notes.append(
            "megatron's selective recompute repeats attention's core; plait's repeats all that is cheap."
        )
    if setup.precision == "bf16":
        lines.append("--bf16")
    if plan.pipe.cut:
        notes.append("megatron cuts its stages evenly; the plan's own cut is not written.")
    lines += _model(setup.shape)
    return Exported(text="\n".join(lines) + "\n", notes=tuple(notes))


def _model(shape: TransformerShape | None) -> list[str]:
    if shape is None:
        return []
    lines = [
        f"--num-layers {shape.layers}",
        f"--hidden-size {shape.hidden}",
        f"--ffn-hidden-size {shape.ffn}",
        f"--num-attention-heads {shape.heads}",
        f"--seq-length {shape.seq}",
        f"--max-position-embeddings {shape.seq}",
        f"--vocab-size {shape.vocab}",
        f"--attention-dropout {shape.dropout}",
        f"--hidden-dropout {shape.dropout}",
    ]
    if shape.kv_heads < shape.heads:
        lines += ["--group-query-attention", f"--num-query-groups {shape.kv_heads}"]
    if shape.family == "llama":
        lines += ["--swiglu", "--normalization RMSNorm", "--position-embedding-type rope"]
    if not shape.bias:
        lines.append("--disable-bias-linear")
    if not shape.tied:
        lines.append("--untie-embeddings-and-output-weights")
    if shape.attention == "fused":
        lines.append("--attention-backend flash")
    return lines


MEGATRON = Exporter(name="megatron", file_name="megatron_arguments.txt", refusal=refusal, write=write)
