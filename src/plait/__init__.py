"""plait: one description of a training job, run in every way that a cluster allows.

    import plait

    job = plait.Job(model=..., data=..., loss=..., optimizer=..., batch=64)   # plain PyTorch
    result = plait.train(job, "ddp", 4)                                       # or plan="auto"
    result.losses, result.weights, result.folder
    plait.train("path.py", "megatron", changes=plait.Changes(mesh={"data": 2, "tensor": 2}, args={"lr": 3e-4}))

What to call. Names and options are those of the command line; `help(plait.train)` has the details.

    describe    Job, Until             what is trained: network, data, loss, optimizer
                Objective              one of several that are trained in turn (GANs)
                Freeze, Average        parameters not trained for a while; averaged weights (EMA, SWA)
                Vertices, Structure    a function of one vertex, over graphs that differ by sample (tree-LSTMs)
                Batched                code for one sample, run for many at once
                load_job               a job from a file, as on the command line: "path.py:function"
                resolve                a Plan from a name, a .yaml file, ranks, a mesh, settings
    look        capture                the dataflow graph of a step             plait graph
                verdict                static or dynamic, and why               plait graph
                placements             where its tensors are under a plan       plait graph --placements
                rewritten              a cheaper graph that computes the same   plait graph --rewrite
    decide      choose                 the plans for a cluster, ranked          plait plan
                scale                  the best plan on 1, 2, 4, ... devices    plait plan --scale
                export_plan            a plan for another system                plait plan --export
                predict                time and memory of a step                plait predict
                measure                this machine, for predictions            plait measure
                validate               predictions against published numbers    plait validate
    do          train                  run it, here                             plait run
                resume                 go on with a run, on any ranks           plait run --resume
                parallelize            a step inside a loop of your own
                wrap                   a model in a loop of your own: what DistributedDataParallel is
                prepare                the loop's model, optimizer, DataLoader and scheduler
                launch                 call a function in several processes
    tune        tune                   several arguments on folds of the data   plait try
                find_lr                which learning rate, by a run in which it grows  plait lr
    check       verify                 does a plan compute what one process does    plait verify
                doctor                 what works on this machine               plait doctor
                links                  how fast its processes reach each other  plait links
    look back   read_run               everything in a run folder               plait report
                write_page             a page that shows it                     plait report
                compare                runs and predictions side by side        plait compare
                export                 the trained weights as a file            plait export

Code of your own is called after steps, evaluations, epochs and saves: see `Callback`.
Options that belong together are values: `Changes` of a job and its plan; `Saving`, `Limits`, `Trial` and `Watching` of
a run; `Search` of a choice, `Tries` of `tune`, `Elsewhere` of engines. All errors are `PlaitError`s that say what is
wrong and how to fix it.
"""

import gc as _gc
import random as _random
import sys as _sys
from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

from plait import processes as _processes  # noqa: F401, notes who started this process before all that is slow
from plait.docstrings import shown_in_help as _shown_in_help
from plait.version import VERSION as _VERSION

if TYPE_CHECKING:
    from plait.api.choose import Choice, choose, export_plan, scale
    from plait.api.doctor import Diagnosis, doctor
    from plait.api.graphs import Placed, RewrittenGraph, Verdict, capture, placements, rewritten, verdict
    from plait.api.links import links
    from plait.api.machine import measure
    from plait.api.predict import predict
    from plait.api.proof import verify
    from plait.api.rates import Rates, find_lr
    from plait.api.runs import export
    from plait.api.train import resume, train
    from plait.api.tune import Tried, Tuned, tune
    from plait.api.validate import Validation, validate
    from plait.callbacks import (
        Callback,
        Ended,
        EpochDone,
        Evaluated,
        Failed,
        Saved,
        Started,
        StepDone,
        Stop,
        Watching,
    )
    from plait.dynamic.batched import Batched
    from plait.dynamic.structure import Structure
    from plait.dynamic.vertices import States, Vertices
    from plait.errors import PlaitError
    from plait.job.job import Job, Until
    from plait.job.named.reference import load_job
    from plait.job.updates.average import Average
    from plait.job.updates.freeze import Freeze
    from plait.job.updates.objectives import Objective
    from plait.options import Changes, Elsewhere, Limits, Saving, Search, Trial, Tries
    from plait.plan.named import resolve
    from plait.plan.plan import Plan
    from plait.report.compare import Comparison, compare
    from plait.report.page import write_page
    from plait.report.record import RunRecord, read_run
    from plait.run.measure.links.link_times import LinkReport
    from plait.run.measure.machine import Measured
    from plait.run.measure.predict import Predicted
    from plait.run.own_loop import launch, prepare, wrap
    from plait.run.parallelize import Step, parallelize
    from plait.run.record.result import Result
    from plait.run.verify import Verification

_NAMES = {
    "api.choose": "Choice choose export_plan scale",
    "api.doctor": "Diagnosis doctor",
    "api.graphs": "Placed RewrittenGraph Verdict capture placements rewritten verdict",
    "api.links": "links",
    "api.machine": "measure",
    "api.predict": "predict",
    "api.proof": "verify",
    "api.rates": "Rates find_lr",
    "api.runs": "export",
    "api.train": "resume train",
    "api.tune": "Tried Tuned tune",
    "api.validate": "Validation validate",
    "callbacks": "Callback Ended EpochDone Evaluated Failed Saved Started StepDone Stop Watching",
    "dynamic.batched": "Batched",
    "dynamic.structure": "Structure",
    "dynamic.vertices": "States Vertices",
    "errors": "PlaitError",
    "job.job": "Job Until",
    "job.named.reference": "load_job",
    "job.updates.average": "Average",
    "job.updates.freeze": "Freeze",
    "job.updates.objectives": "Objective",
    "options": "Changes Elsewhere Limits Saving Search Trial Tries",
    "plan.named": "resolve",
    "plan.plan": "Plan",
    "report.compare": "Comparison compare",
    "report.page": "write_page",
    "report.record": "RunRecord read_run",
    "run.measure.links.link_times": "LinkReport",
    "run.measure.machine": "Measured",
    "run.measure.predict": "Predicted",
    "run.own_loop": "launch prepare wrap",
    "run.parallelize": "Step parallelize",
    "run.record.result": "Result",
    "run.verify": "Verification",
}
"""By module, the names that live in it. It is imported when one is first asked for: torch takes seconds, `import plait`
should not."""
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
_ROOMS = (
    "cluster", "errors", "graph", "job", "plan", "program", "report", "run", "search", "shm", "trace", "units",
)  # fmt: skip

__version__ = _VERSION
__all__ = [
    "Average",
    "Batched",
    "Callback",
    "Changes",
    "Choice",
    "Comparison",
    "Diagnosis",
    "Elsewhere",
    "Ended",
    "EpochDone",
    "Evaluated",
    "Failed",
    "Freeze",
    "Job",
    "Limits",
    "LinkReport",
    "Measured",
    "Objective",
    "Placed",
    "PlaitError",
    "Plan",
    "Predicted",
    "Rates",
    "Result",
    "RewrittenGraph",
    "RunRecord",
    "Saved",
    "Saving",
    "Search",
    "Started",
    "States",
    "Step",
    "StepDone",
    "Stop",
    "Structure",
    "Trial",
    "Tried",
    "Tries",
    "Tuned",
    "Until",
    "Validation",
    "Verdict",
    "Verification",
    "Vertices",
    "Watching",
    "__version__",
    "capture",
    "choose",
    "compare",
    "doctor",
    "export",
    "export_plan",
    "find_lr",
    "launch",
    "links",
    "load_job",
    "measure",
    "parallelize",
    "placements",
    "predict",
    "prepare",
    "read_run",
    "resolve",
    "resume",
    "rewritten",
    "scale",
    "train",
    "tune",
    "validate",
    "verdict",
    "verify",
    "wrap",
    "write_page",
]


if "torch.distributed" in _sys.modules:  # else torch, when it is imported, asks plait.shm by an entry point
    _import_module("plait.shm")


def _imported(module: str) -> Any:
    """A module of ours. What is imported stays: nobody looks for garbage in it meanwhile, nor, where torch came with it
    and the caller can have no tensors yet, ever after; on the command line that was a fifth of a short run."""
    collects, has_torch = _gc.isenabled(), "torch" in _sys.modules
    _gc.disable()
    try:
        return _import_module(module)
    finally:
        if not has_torch and "torch" in _sys.modules:
            _gc.freeze()
        if collects:
            _gc.enable()


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return _imported(f"plait.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'plait' has no attribute {name!r}")
    before = _random.getstate()
    found = getattr(_imported(f"plait.{_HOME[name]}"), name)
    _random.setstate(before)  # rich draws a number when it is imported
    if isinstance(found, type):
        _shown_in_help(found)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
