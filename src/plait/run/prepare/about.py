"""What a run is about to do, for whoever watches it.

In: compiled programs, and where the run goes. Out: plain values, told in the first event of a run. It
decides nothing.
"""

from pathlib import Path
from typing import Any

from plait.run.prepare.programs import Programs


def about(programs: Programs, folder: Path, device: str, start_step: int) -> dict[str, Any]:
    """The model and its size, the plan and its ranks, the batch, the steps, the folder."""
    job, plan, graph = programs.whole, programs.plan, programs.captures.first
    if graph is not None and not job.objectives:
        nodes = graph.nodes()
        sizes = [
            (nodes[entry.node].meta["val"].numel(), entry.trainable) for entry in graph.inputs_of("parameter")
        ]
        model = graph.model
    else:
        built = job.build_model()
        sizes = [(parameter.numel(), parameter.requires_grad) for parameter in built.parameters()]
        model = type(built).__name__
    return {
        "model": model,
        "num_parameters": sum(size for size, _ in sizes),
        "num_trainable": sum(size for size, trainable in sizes if trainable),
        "plan": plan.name,
        "ranks": plan.ranks,
        "mesh": dict(plan.mesh.axes),
        "servers": plan.sync.servers,
        "device": device,
        "batch": job.batch,
        "accumulate": job.accumulate,
        "total_steps": job.total_steps(programs.captures.source.num_samples),
        "start_step": start_step,
        "folder": str(folder),
    }
