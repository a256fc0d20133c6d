"""The command line: `plait run | plan | predict | measure | validate | graph | verify | report | export`.

Exit codes: 0 ok, 1 failed, 2 bad usage. A traceback is shown only with --debug.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

os.environ.setdefault(
    "TORCH_CPP_LOG_LEVEL", "ERROR"
)  # before torch: c10d warns of host names that do not matter here

import typer
from rich.console import Console

from plait.cli.auto_plan import choose_for_run
from plait.cli.graph_command import graph_command
from plait.cli.options import REMEMBERED, job_with, load_run_settings, parse_mesh, parse_settings, parse_slow
from plait.cli.placements_command import Asked, placements_command
from plait.cli.plan_options import plan_
from plait.cli.predict_options import measure_, predict_
from plait.cli.progress import show_progress
from plait.cli.validate_command import validate
from plait.cli.verify_command import print_verification
from plait.errors import ClusterError, JobError, PlaitError, PlanError, UsageError
from plait.files.write import write_or_tell
from plait.job.reference import load_job
from plait.options import Limits, Listener, Saving, Trial
from plait.plan.named import NAMED
from plait.plan.plan import Plan
from plait.report.page import write_page
from plait.report.text import print_report, report_json
from plait.run.checkpoint.store import export_checkpoint
from plait.run.proof.verify import verify
from plait.run.train import train

_BadCommandLine: Any = typer.BadParameter.__mro__[2]
"""ClickException: click's own, or that of the copy which newer versions of typer carry."""

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich",
    help="Train one unmodified PyTorch model in every way the field knows.",
    epilog="With --debug, anywhere, an error shows where in plait it came from.",
)  # fmt: skip

JobArgument = Annotated[
    str,
    typer.Argument(
        metavar="JOB", help="path.py[:function] or module:function; the function is `job` by default."
    ),
]
PlanOption = Annotated[
    str | None, typer.Option("--plan", help=f"A plan's name ({', '.join(NAMED)}) or a .yaml file.")
]
RunPlanOption = Annotated[
    str | None, typer.Option("--plan", help=f"`auto`, a plan's name ({', '.join(NAMED)}) or a .yaml file.")
]
MeshOption = Annotated[
    str | None, typer.Option("--mesh", metavar="AXIS=N,...", help="Ranks along each axis: data=2,tensor=2.")
]
RanksOption = Annotated[int | None, typer.Option("--ranks", help="Number of processes.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change the job (batch=128) or the plan (sync.bucket_mib=4)."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]
DeviceOption = Annotated[str, typer.Option("--device", help="cpu or cuda.")]


@app.command()
def run(
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="JOB", help="path.py[:function] or module:function; not needed with --resume."
        ),
    ] = None,
    plan: RunPlanOption = None,
    ranks: RanksOption = None,
    mesh: MeshOption = None,
    steps: Annotated[int | None, typer.Option(help="Stop after this many optimizer steps.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run folder; runs/NAME-TIME by default.")] = None,
    set_: SetOption = None,
    device: Annotated[str | None, typer.Option("--device", help="cpu (the default) or cuda.")] = None,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(help="Save a checkpoint every so many steps; one is saved at the end anyway."),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Continue the run in this folder, on any number of ranks.")
    ] = None,
    record_samples: Annotated[
        bool | None, typer.Option(help="Write the sample ids of every step to samples.jsonl.")
    ] = None,
    trace: Annotated[bool, typer.Option(help="Record every instruction of every rank.")] = True,
    hang_s: Annotated[
        float, typer.Option(help="Report a hang after so many seconds; sooner where a rank does nothing.")
    ] = 300.0,
    slow: Annotated[
        list[str] | None,
        typer.Option(metavar="RANK=FACTOR", help="Make a rank take so many times as long to compute."),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Refuse a plan that needs more of a device than this: 70GiB.")
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Train JOB and leave a run folder with its plan, metrics, trace and checkpoints."""
    stored = load_run_settings(resume) if resume is not None else {}
    reference = job or stored.get("job")
    if reference is None:
        told = f"{resume} does not say which job it ran" if resume is not None else "no job was given"
        raise UsageError(f"{told}.", fix="name it: plait run path.py --plan ddp --ranks 2.")
    given = {
        "steps": steps,
        "device": device,
        "checkpoint_every": checkpoint_every,
        "record_samples": record_samples,
    }
    options = stored | {key: value for key, value in given.items() if value is not None}
    same = ranks is None and mesh is None
    plan = plan or (str(stored["plan_file"]) if "plan_file" in stored and same else stored.get("plan"))
    settings = [*stored.get("settings", []), *(set_ or [])]
    job_settings, plan_settings = parse_settings(settings)
    loaded = job_with(load_job(reference), job_settings)
    name = Path(reference.split(":")[0]).stem
    chosen: str | Plan | None = plan
    if plan == "auto":
        with _console(True).status("choosing a plan") as status:
            auto = choose_for_run(loaded, name, ranks, mesh, options.get("device") or "cpu", status.update)
        loaded, chosen = auto.job, auto.plan
        settings.append(f"accumulate={loaded.accumulate}")
        _console(json_).print(auto.told, highlight=False, soft_wrap=True)
    remembered = {key: options.get(key) for key in REMEMBERED} | {
        "job": _anywhere(reference),
        "settings": settings,
    }
    with show_progress(_console(json_), quiet=json_) as listener, _failing_after_start(listener) as heard:
        result = train(
            loaded, chosen, ranks, steps=options.get("steps"), out=out or resume, device=options.get("device") or "cpu",
            settings=plan_settings, mesh=parse_mesh(mesh), resume=resume, trace=trace, listener=heard,
            saving=Saving(
                checkpoint_every=options.get("checkpoint_every"),
                record_samples=bool(options.get("record_samples")), name=name, remembered=remembered,
            ),
            limits=Limits(memory=memory, hang_s=hang_s), trial=Trial(slow=parse_slow(slow or [])),
        )  # fmt: skip
    if trace:
        write_or_tell(
            lambda: write_page(result.folder), lambda text: print(f"notice: {text}", file=sys.stderr)
        )
    if json_:
        summary = {
            "folder": str(result.folder), "losses": result.losses, "evaluation": dict(result.evaluation),
            "stopped": result.stopped, "notices": list(result.notices),
        }  # fmt: skip
        print(json.dumps(summary))
    else:
        if result.stopped not in (None, "interrupted"):
            _console(False).print(f"stopped: {result.stopped}", highlight=False, soft_wrap=True)
        where = f"run folder: [bold]{result.folder}[/bold]  (plait report {result.folder})"
        _console(False).print(where, highlight=False, soft_wrap=True)
    if result.stopped == "interrupted":
        print(f"interrupted and saved; to go on: plait run --resume {result.folder}", file=sys.stderr)
        raise typer.Exit(1)


@app.command()
def graph(
    job: JobArgument,
    batch: Annotated[
        int | None, typer.Option(help="Samples to capture with; the job's own micro-batch by default.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Draw the dataflow graph as a page that opens offline.")
    ] = None,
    placements: Annotated[
        bool,
        typer.Option("--placements", help="Show where every tensor is under a plan, and what is exchanged."),
    ] = False,
    plan: PlanOption = None,
    ranks: RanksOption = None,
    mesh: MeshOption = None,
    set_: SetOption = None,
    json_: JsonOption = False,
) -> None:
    """Show what one training step of JOB computes: parameters, ops, FLOPs, memory, the costliest modules.

    With --placements: where its tensors are under a plan, and what ranks exchange.
    """
    console = _console(False)
    if placements:
        of_job, of_plan = parse_settings(set_ or [])
        asked = Asked(
            plan=plan, ranks=ranks or (None if mesh else _ranks_of(plan)), mesh=parse_mesh(mesh),
            job_settings=of_job, plan_settings=of_plan,
        )  # fmt: skip
        raise typer.Exit(
            placements_command(job, asked, batch=batch, json_output=json_, html=html, console=console)
        )
    if plan or ranks or mesh or set_:
        raise UsageError(
            "--plan, --ranks, --mesh and --set say how a step is run.", fix="add --placements to see it."
        )
    raise typer.Exit(graph_command(job, batch=batch, json_output=json_, html=html, console=console))


app.command(name="plan")(plan_)
app.command(name="predict")(predict_)
app.command(name="measure")(measure_)
app.command(name="validate")(validate)


@app.command(name="verify")
def verify_(
    job: JobArgument,
    plan: PlanOption = None,
    ranks: RanksOption = None,
    mesh: MeshOption = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps to compare.")] = 3,
    fp32: Annotated[bool, typer.Option("--fp32", help="Compare in float32 instead of float64.")] = False,
    serial: Annotated[bool, typer.Option("--serial", help="All ranks in this process; 64 are fine.")] = False,
    set_: SetOption = None,
    device: DeviceOption = "cpu",
    json_: JsonOption = False,
) -> None:
    """Run JOB both ways, under a plan and on one process, and compare loss, gradients, weights and buffers."""
    job_settings, plan_settings = parse_settings(set_ or [])
    loaded = job_with(load_job(job), job_settings)
    with show_progress(_console(json_), quiet=json_) as listener:
        outcome = verify(
            loaded, plan or (None if mesh else "ddp"), ranks or (None if mesh else _ranks_of(plan)), steps=steps,
            fp32=fp32, serial=serial, device=device, settings=plan_settings, mesh=parse_mesh(mesh), listener=listener,
        )  # fmt: skip
    print_verification(outcome, _console(False), json_output=json_)
    raise typer.Exit(0 if outcome.ok else 1)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run folder.")],
    json_: JsonOption = False,
) -> None:
    """Show where the time of a run went, per rank, and how the loss fell."""
    if not folder.is_dir():
        raise UsageError(f"there is no run folder {folder}.", fix="give the folder that plait run printed.")
    if json_:
        print(json.dumps(report_json(folder)))
    else:
        print_report(folder, _console(False))


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run folder or a checkpoint.")],
    to: Annotated[str, typer.Option("--to", help="safetensors or state_dict.")] = "safetensors",
    out: Annotated[Path | None, typer.Option(help="The file to write; beside the run by default.")] = None,
) -> None:
    """Write the trained weights under the model's own names."""
    if to not in ("safetensors", "state_dict"):
        raise UsageError(f"--to {to!r} is not known.", fix="use safetensors or state_dict.")
    target = out or folder / ("weights.safetensors" if to == "safetensors" else "weights.pt")
    _console(False).print(f"wrote {export_checkpoint(folder, to=to, out=target)}")  # type: ignore[arg-type]


class _FailedRunError(Exception):
    """An error of a run that had started: whatever its kind, it is no bad usage."""

    def __init__(self, error: PlaitError) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def _failing_after_start(listener: Listener) -> Iterator[Listener]:
    """The listener; once it was told that training started, errors are those of a failed run."""
    started = False

    def heard(event: dict[str, Any]) -> None:
        nonlocal started
        started = started or "started" in event
        listener(event)

    try:
        yield heard
    except PlaitError as error:
        if started:
            raise _FailedRunError(error) from error
        raise


def _anywhere(reference: str) -> str:
    """The reference with a path that holds from every folder, for resuming."""
    path, colon, function = reference.partition(":")
    return f"{Path(path).resolve()}{colon}{function}" if path.endswith(".py") else reference


def _ranks_of(plan: str | None) -> int | None:
    """Ranks to verify a plan on where none are given: 2, or what a file says."""
    return 1 if plan == "single" else 2 if plan is None or plan in NAMED else None


def _console(to_stderr: bool) -> Console:
    return Console(stderr=to_stderr)


def main() -> NoReturn:
    """Entry point: errors become one paragraph and an exit code."""
    sys.exit(call(sys.argv[1:]))


def call(arguments: Sequence[str]) -> int:
    """Do what the command line says and return its exit code."""
    debug = "--debug" in arguments
    try:
        given = [argument for argument in arguments if argument != "--debug"]
        outcome: Any = app(args=given, prog_name="plait", standalone_mode=False)
        return int(outcome) if isinstance(outcome, int) else 0
    except typer.Exit as done:
        return int(done.exit_code)
    except _BadCommandLine as error:
        error.show()
        return 2
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return 1
    except _FailedRunError as failed:
        if debug:
            raise
        _tell(failed.error)
        return 1
    except PlaitError as error:
        if debug:
            raise
        _tell(error)
        return 2 if isinstance(error, (UsageError, ClusterError, PlanError, JobError)) else 1


def _tell(error: PlaitError) -> None:
    """One paragraph; that of a worker ends with its own traceback, so that the first cause comes last."""
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
