"""What a decision of a plan may be: checks that every group of them uses.

In: a name and a value from a person or a file. Out: nothing, or a `PlanError` with its fix.
"""

import math
from typing import Any

from plait.errors import PlanError


def check_bool(name: str, value: Any) -> None:
    """Refuse what is neither true nor false."""
    if not isinstance(value, bool):
        raise PlanError(f"{name}={value!r} is neither true nor false.", fix="set it to true or false.")


def is_number(value: Any) -> bool:
    """Whether it is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def check_count(name: str, value: Any, least: int) -> None:
    """Refuse what is no whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise PlanError(
            f"{name}={value!r} is not possible.", fix=f"set it to a whole number, {least} or more."
        )


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Refuse what is none of the choices."""
    if value not in choices:
        raise PlanError(f"{name}={value!r} is unknown.", fix=f"use one of {', '.join(choices)}.")
