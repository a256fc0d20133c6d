"""A place that is said outright: by plait's own engines, a Kubernetes Job, or a person."""

from collections.abc import Mapping

from plait.run.join.place import Place, number

_NAME = "PLAIT_TASK"


def read(environment: Mapping[str, str]) -> Place | None:
    """The place that PLAIT_TASK, PLAIT_TASKS and PLAIT_FIRST_ADDRESS name."""
    if "PLAIT_TASKS" not in environment:
        return None
    return Place(
        engine=environment.get("PLAIT_ENGINE", _NAME),
        task=number(environment, _NAME, "PLAIT_TASK"),
        tasks=number(environment, _NAME, "PLAIT_TASKS"),
        local_tasks=number(environment, _NAME, "PLAIT_LOCAL_TASKS", 1),
        first=environment.get("PLAIT_FIRST_ADDRESS"),
        run=environment.get("PLAIT_RUN_ID", ""),
        restarts=number(environment, _NAME, "PLAIT_RESTARTS", 0) > 0,
        absent=number(environment, _NAME, "PLAIT_ABSENT", 0),
    )
