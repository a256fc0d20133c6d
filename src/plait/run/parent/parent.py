"""What the parent does around its ranks: it starts them, hears what they tell, and sums up.

In: a task, its programs, and a function that starts the processes. Out: the run's summary. Where workers march, rank 0
writes the journal and measures; else the parent does, for any worker may die: it decides when the goal is reached, and
measures at the end where nobody else has. Which ranks the run can do without depends on how they agree on weights.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from plait.errors import LostError, RunError, WorkerError
from plait.options import Listener
from plait.plan.plan import Plan
from plait.run.checkpoint.store import load_checkpoint
from plait.run.hold.state import ModelState
from plait.run.loop.task import Task
from plait.run.parent.shared_saver import OnEvent, StartRanks, on_shared_model
from plait.run.prepare.programs import Programs
from plait.run.record.evaluate import evaluate
from plait.run.record.journal import Journal
from plait.run.record.ledger import Ledger
from plait.run.record.shares import drop_shares
from plait.run.setup.device import choose_device
from plait.run.start.launch import Interrupted


def run_all(
    task: Task,
    programs: Programs,
    tell: Listener,
    start: Callable[..., list[Any]],
    wants_end: Callable[[], str | None] = lambda: None,
) -> dict[str, Any]:
    """Run all ranks; `start` is given the task, the programs, who listens, which ranks can be missed, and a model that
    workers share, where they do. Once `wants_end` has a reason, all are asked to end."""
    run: StartRanks = partial(start, task, programs)
    if task.plan.agreement.weights == "shared":
        run = on_shared_model(task, tell, run)
    if task.plan.agreement.marches:
        summary = _summed_up(_run_marching(run, tell, wants_end))
    else:
        summary = _run_apart(task, programs, tell, run, wants_end)
    if summary["stopped"] == "interrupted":
        summary["stopped"] = wants_end() or "interrupted"
    return summary


def _run_marching(run: StartRanks, tell: Listener, wants_end: Callable[[], str | None]) -> list[Any]:
    """What all ranks returned; of an interrupted run, what those returned that had time to."""

    def on_event(rank: int, event: dict[str, Any]) -> bool:
        tell(event)
        return wants_end() is not None

    try:
        return run(on_event, ())
    except Interrupted as stop:
        if not stop.returned or not any(stop.results):
            raise
        return stop.results


def _summed_up(results: list[Any]) -> dict[str, Any]:
    """What all ranks have counted; the first rank's word counts where several have one."""
    counted: dict[str, Any] = {}
    for result in reversed(results):
        counted |= result or {}
    counted["bytes_sent"] = {
        str(rank): result["bytes_sent"]
        for rank, result in enumerate(results)
        if result and "bytes_sent" in result
    }
    counted["graphs"] = [result["graphs"] for result in results if result and result.get("graphs")]
    return counted


def _run_apart(
    task: Task, programs: Programs, tell: Listener, run: StartRanks, wants_end: Callable[[], str | None]
) -> dict[str, Any]:
    """Run workers that do not march, and write down what they tell."""
    plan, first_step, progress = task.plan, 0, {}
    if task.resume is not None:
        state = load_checkpoint(task.resume)
        first_step, progress = state.step, state.extra.get("progress", {})
    below = first_step if task.resume is not None or task.attempt else None
    says_all = task.tell_every_step
    with Journal(
        task.folder, tell, keep_below=below, samples=task.record_samples, says_all=says_all
    ) as journal:
        order = task.job.order(programs.captures.source.num_samples)
        ledger = Ledger(journal, plan.mesh.size, task.job.until, progress, order)
        try:
            results = run(_listener(plan, ledger, tell, wants_end), _dispensable(task))
        except Interrupted as stop:
            if not stop.returned:
                raise
            results, ledger.stopped = stop.results, "interrupted"
        except RunError as error:
            ledger.leave()
            if (
                isinstance(error, WorkerError)
                and not isinstance(error, LostError)
                and error.rank >= plan.mesh.size
            ):
                error.what = f"a server is gone, and with it the weights: {error.what}"
            raise
        ledger.stopped = ledger.stopped or wants_end()
        ledger.close(set(ledger.gaps(first_step)) - set(task.leave_out))
        if (lost := ledger.told_losses()) is not None:
            tell({"notice": lost})
        if task.job.evaluate is not None and not ledger.evaluation and ledger.stopped != "interrupted":
            _evaluate_last(task, programs, ledger)
    drop_shares(task.folder)
    return {"updates": ledger.num_updates} | _summed_up(results) | {
        "losses": ledger.in_order(),
        "stopped": ledger.stopped,
        "evaluation": ledger.evaluation,
        "shares_by_worker": ledger.tickets,
    }  # fmt: skip


def _dispensable(task: Task) -> range:
    """Workers that the others do without: those who do not meet, but in a run that outlives ranks only where others
    take over their shares; else it is started again without them, so that nothing is left out."""
    agreement = task.plan.agreement
    return range(
        task.plan.mesh.size if agreement.alone and (agreement.takes_next or not task.outlives) else 0
    )


def _listener(plan: Plan, ledger: Ledger, tell: Listener, wants_end: Callable[[], str | None]) -> OnEvent:
    def on_event(rank: int, event: dict[str, Any]) -> bool:
        if "share" in event:
            ledger.take_share(rank, event["share"])
        elif "evaluated" in event:
            return ledger.take_evaluation(event["evaluated"])
        elif "lost" in event:
            tell({"notice": f"{event['lost']} {_meaning_of_loss(plan)}"})
            if not plan.agreement.takes_next:
                ledger.lose_share(rank)
        else:
            tell(event)
        return wants_end() is not None

    return on_event


def _meaning_of_loss(plan: Plan) -> str:
    if plan.agreement.takes_next:
        return "The others go on and take over its data; the shares that it held at that moment are lost."
    return "The others go on; its shares of later steps are not trained on."


def _evaluate_last(task: Task, programs: Programs, ledger: Ledger) -> None:
    """Measure what the last checkpoint holds."""
    held_out = programs.held_out
    assert held_out is not None
    state = ModelState(task.job, choose_device(task.device, 0), task.dtype)
    state.load(load_checkpoint(task.folder))
    measured = evaluate(state, held_out, 0, 1, lambda sums: sums)
    ledger.write_evaluation({"step": state.steps_done - 1, "epoch": 0, "evaluate": measured})
