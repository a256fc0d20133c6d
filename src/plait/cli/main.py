"""The command line: `plait run | graph | verify | report | export`.

Exit codes: 0 ok, 1 failed, 2 bad usage. A traceback is shown only with --debug.
"""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch: c10d warns of host names that do not matter here

import typer
from rich.console import Console

from plait.cli.graph_command import graph_command
from plait.cli.options import job_with, load_run_settings, parse_settings
from plait.cli.progress import show_progress
from plait.cli.verify_command import print_verification
from plait.errors import JobError, PlaitError, PlanError, UsageError, WorkerError
from plait.job.reference import load_job
from plait.report.page import write_page
from plait.report.text import print_report, report_json
from plait.run.checkpoint import export_checkpoint
from plait.run.train import train
from plait.run.verify import verify

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich",
    help="Train one unmodified PyTorch model in every way the field knows.",
)  # fmt: skip

JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="path.py[:function] or module:function; the function is `job` by default.")]
PlanOption = Annotated[str | None, typer.Option("--plan", help="A plan's name (single, ddp) or a .yaml file.")]
RanksOption = Annotated[int | None, typer.Option("--ranks", help="Number of processes.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the job (batch=128) or the plan (sync.bucket_mib=4).")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]
DeviceOption = Annotated[str, typer.Option("--device", help="cpu or cuda.")]


@app.command()
def run(
    job: Annotated[str | None, typer.Argument(metavar="JOB", help="path.py[:function] or module:function; not needed with --resume.")] = None,
    plan: PlanOption = None,
    ranks: RanksOption = None,
    steps: Annotated[int | None, typer.Option(help="Stop after this many optimizer steps.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run folder; runs/NAME-TIME by default.")] = None,
    set_: SetOption = None,
    device: DeviceOption = "cpu",
    checkpoint_every: Annotated[int | None, typer.Option(help="Save a checkpoint every so many steps; one is saved at the end anyway.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue the run in this folder, on any number of ranks.")] = None,
    record_samples: Annotated[bool, typer.Option(help="Write the sample ids of every step to samples.jsonl.")] = False,
    trace: Annotated[bool, typer.Option(help="Record every instruction of every rank.")] = True,
    hang_s: Annotated[float, typer.Option(help="Report a hang after so many seconds.")] = 300.0,
    json_: JsonOption = False,
) -> None:
    """Train JOB and leave a run folder with its plan, metrics, trace and checkpoints."""
    stored = load_run_settings(resume) if resume is not None else {}
    reference = job or stored.get("job")
    if reference is None:
        raise UsageError("no job was given.", fix="plait run path.py --plan ddp --ranks 2")
    plan = plan or (str(stored["plan_file"]) if "plan_file" in stored and ranks is None else stored.get("plan"))
    settings = [*stored.get("settings", []), *(set_ or [])]
    job_settings, plan_settings = parse_settings(settings)
    loaded = job_with(load_job(reference), job_settings)
    name = Path(reference.split(":")[0]).stem
    with show_progress(_console(json_), quiet=json_) as listener:
        result = train(
            loaded, plan, ranks, steps=steps if steps is not None else stored.get("steps"), out=out or resume, device=device,
            settings=plan_settings, checkpoint_every=checkpoint_every, resume=resume, record_samples=record_samples,
            trace=trace, hang_s=hang_s, listener=listener, name=name,
            extra={"job": reference, "settings": settings, "steps": steps, "plan": plan},
        )  # fmt: skip
    if trace:
        write_page(result.folder)
    if json_:
        summary = {
            "folder": str(result.folder), "losses": result.losses, "evaluation": dict(result.evaluation),
            "stopped": result.stopped, "notices": list(result.notices),
        }  # fmt: skip
        print(json.dumps(summary))
    else:
        _console(json_).print(f"run folder: [bold]{result.folder}[/bold]  (plait report {result.folder})")
    if result.stopped == "interrupted":
        raise typer.Exit(1)


@app.command()
def graph(
    job: JobArgument,
    batch: Annotated[int | None, typer.Option(help="Samples to capture with; the job's own micro-batch by default.")] = None,
    html: Annotated[Path | None, typer.Option(help="Draw the dataflow graph as a page that opens offline.")] = None,
    json_: JsonOption = False,
) -> None:
    """Show what one training step of JOB computes: parameters, ops, FLOPs, memory, the costliest modules."""
    raise typer.Exit(graph_command(job, batch=batch, json_output=json_, html=html, console=_console(False)))


@app.command(name="verify")
def verify_(
    job: JobArgument,
    plan: PlanOption = "ddp",
    ranks: RanksOption = 2,
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
            loaded, plan or "ddp", ranks, steps=steps, fp32=fp32, serial=serial, device=device,
            settings=plan_settings, listener=listener,
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


def _console(to_stderr: bool) -> Console:
    return Console(stderr=to_stderr)


def main() -> NoReturn:
    """Entry point: errors become one paragraph and an exit code."""
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    sys.exit(_call(arguments, debug))


def _call(arguments: list[str], debug: bool) -> int:
    import click

    try:
        outcome: Any = app(args=arguments, prog_name="plait", standalone_mode=False)
        return int(outcome) if isinstance(outcome, int) else 0
    except click.exceptions.Exit as done:
        return int(done.exit_code)
    except click.ClickException as error:
        error.show()
        return 2
    except (KeyboardInterrupt, click.Abort):
        print("interrupted", file=sys.stderr)
        return 1
    except PlaitError as error:
        if debug:
            raise
        _tell(error)
        return 2 if isinstance(error, (UsageError, PlanError, JobError)) else 1


def _tell(error: PlaitError) -> None:
    """One paragraph; a worker's own traceback before it, so that the first cause comes last."""
    if isinstance(error, WorkerError) and error.traceback:
        print(error.traceback.rstrip(), file=sys.stderr)
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
