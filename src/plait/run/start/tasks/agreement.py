"""That all tasks are about to do the same, and words for those that are not.

In: what two tasks are about to do. Out: nothing, or an error in one line that names the task and what differs.
"""

from collections.abc import Mapping
from typing import Any

from plait.errors import UsageError
from plait.run.start.tasks.members import Other


def compare(facts: Mapping[str, Any], other: Other) -> None:
    """Refuse a task that is about to do something else."""
    found = other.facts
    assert found is not None
    for name in facts:
        if found.get(name) != facts[name]:
            raise UsageError(
                f"task {other.task} on {other.host} has {'other' if name in ('steps', 'epochs') else 'another'} {name} "
                f"than task 0: {_brief(found.get(name))}, not {_brief(facts[name])}.",
                fix="start the same command, with the same files and versions, on all hosts.",
            )


def name_tasks(found: Any) -> str:
    numbers = sorted(found)
    return f"{'task' if len(numbers) == 1 else 'tasks'} {', '.join(map(str, numbers))}"


def _brief(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
