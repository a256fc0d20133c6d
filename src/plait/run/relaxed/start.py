"""A run whose workers do not march in step: what the parent does around it, and which part each rank plays.

In: a task, its programs, and a function that starts the processes. Out: a summary as any other run gives it. The parent
alone writes the journal, for any worker may die; it decides when the goal is reached, and measures at the end where
nobody else has. Which ranks the run can do without depends on the plan.
"""

from collections.abc import Callable, Collection
from typing import Any

from plait.errors import CheckpointError, PlaitError, RunError, WorkerError
from plait.options import Listener
from plait.plan.plan import Plan
from plait.run.checkpoint.store import load_checkpoint, locate_checkpoint
from plait.run.interpret.state import ModelState
from plait.run.loop.evaluate import evaluate
from plait.run.loop.journal import Journal
from plait.run.loop.shares import drop_shares
from plait.run.loop.worker import Task
from plait.run.prepare.programs import Programs
from plait.run.relaxed.rounds import Rounds
from plait.run.start.device import choose_device
from plait.run.start.launch import Interrupted

OnEvent = Callable[[int, dict[str, Any]], bool]
StartRanks = Callable[[OnEvent, Collection[int]], list[Any]]
"""Runs all ranks, given who listens and which ranks the run can do without; returns what each returned."""


def is_free(plan: Plan) -> bool:
    """Whether workers run free of each other, or with servers, and not in the lockstep loop."""
    rule = plan.sync.rule
    return plan.sync.has_servers or rule == "hogwild" or (rule == "easgd" and plan.sync.servers > 0)


def takes_tickets(plan: Plan) -> bool:
    """Whether a worker takes what is next, and not its own share of every step."""
    rule = plan.sync.rule
    return rule in ("server-async", "hogwild") or (rule == "easgd" and plan.elastic.variant == "async")


def dispensable(plan: Plan) -> range:
    """The ranks without which a run goes on: workers that do not meet within a step."""
    return range(plan.mesh.size if plan.sync.alone else 0)


def run_free(task: Task, programs: Programs, tell: Listener, start: StartRanks) -> dict[str, Any]:
    """Run all ranks of a plan that is free, and write down what they tell."""
    plan, first_step, progress = task.plan, 0, {}
    if task.resume is not None:
        state = load_checkpoint(task.resume)
        first_step, progress = state.step, state.extra.get("progress", {})
    below = first_step if task.resume is not None else None
    with Journal(task.folder, tell, keep_below=below, samples=task.record_samples) as journal:
        rounds = Rounds(journal, plan.mesh.size, task.job.until, progress)

        def on_event(rank: int, event: dict[str, Any]) -> bool:
            if "share" in event:
                rounds.take_share(rank, event["share"])
            elif "evaluated" in event:
                return rounds.take_evaluation(event["evaluated"])
            elif "lost" in event:
                tell({"notice": f"{event['lost']} {_meaning_of_loss(plan)}"})
                if not takes_tickets(plan):
                    rounds.lose_share(rank)
            else:
                tell(event)
            return False

        try:
            results = start(on_event, dispensable(plan))
        except Interrupted as stop:
            if not stop.returned:
                raise
            results, rounds.stopped = stop.results, "interrupted"
        except RunError as error:
            rounds.close()
            raise _with_way_back(error, task) from error
        rounds.close()
        if task.job.evaluate is not None and not rounds.evaluation and rounds.stopped != "interrupted":
            _evaluate_last(task, programs, rounds)
    drop_shares(task.folder)
    counted: dict[str, Any] = {}
    for result in results:
        counted |= result or {}
    counted["bytes_sent"] = {
        str(rank): result["bytes_sent"]
        for rank, result in enumerate(results)
        if result and "bytes_sent" in result
    }
    return {
        "losses": [rounds.losses[step] for step in sorted(rounds.losses)],
        "stopped": rounds.stopped,
        "evaluation": rounds.evaluation,
        "notices": [],
        "shares_by_worker": rounds.tickets,
        "updates": rounds.num_updates,
        **counted,
    }


def _meaning_of_loss(plan: Plan) -> str:
    if takes_tickets(plan):
        return "The others go on and take over its data; the shares that it held at that moment are lost."
    return "The others go on; its shares of later steps are not trained on."


def _with_way_back(error: RunError, task: Task) -> PlaitError:
    """Where a server has died: say what is left of the run."""
    plan = task.plan
    if not isinstance(error, WorkerError) or error.rank < plan.mesh.size:
        return error
    try:
        last = locate_checkpoint(task.folder, on_notice=lambda text: None)
    except CheckpointError:
        return error
    return WorkerError(
        f"a server is gone, and with it the weights: {error.what} The last checkpoint is {last}.",
        rank=error.rank,
        traceback=error.traceback,
        fix=f"continue from there with --resume {task.folder}.",
    )


def _evaluate_last(task: Task, programs: Programs, rounds: Rounds) -> None:
    """Measure what the last checkpoint holds."""
    held_out = programs.held_out
    assert held_out is not None
    state = ModelState(task.job, choose_device(task.device, 0), task.dtype)
    state.load(load_checkpoint(task.folder))
    measured = evaluate(state, held_out, 0, 1, lambda sums: sums)
    rounds.write_evaluation({"step": state.steps_done - 1, "epoch": 0, "evaluate": measured})
