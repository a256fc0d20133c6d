"""Settings of a job and of a plan, as people write them: plain fields of the job, groups of the plan. And arguments.

In: `KEY=VALUE` entries, or a mapping {"batch": 128, "sync": {"bucket_mib": 4}}. Out: the other one, or its two parts.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from plait.errors import UsageError, did_you_mean
from plait.files.document import Format, parse_yaml
from plait.plan.plan import SETTINGS

_VALUE = Format(noun="a value", error=UsageError, fix="quote it, or use a plain value.")

_PLAN_GROUPS = tuple(dict.fromkeys(s.partition(".")[0] for s in SETTINGS if "." in s))
_PLAN_KEYS = (*_PLAN_GROUPS, *(s for s in SETTINGS if "." not in s))
_PLAIN = (bool, int, float, str, type(None))
"""Types that text can be read back as."""
_JOB_KEYS = (
    "batch",
    "epochs",
    "steps",
    "seed",
    "clip_norm",
    "accumulate",
    "precision",
    "evaluate_every",
    "shuffle",
    "batch_norm",
    "drop_last",
    "workers",
    "prefetch",
    "skip_bad",
    "fold",
    "weights",
)


def parse_settings(entries: Sequence[str]) -> dict[str, Any]:
    """`key=value` and `group.key=value` entries as settings of the job and of the plan."""
    found: dict[str, Any] = {}
    for entry in entries:
        key, separator, text = entry.partition("=")
        if not separator or not key:
            raise UsageError(f"--set {entry!r} is not KEY=VALUE.", fix="write it like --set batch=128.")
        value = parse_yaml(text, f"--set {entry!r}", _VALUE).values
        group, dot, name = key.partition(".")
        if dot and group in _PLAN_GROUPS:
            found.setdefault(group, {})[name] = value
        elif key in _JOB_KEYS or (key in _PLAN_KEYS and key not in _PLAN_GROUPS):
            found[key] = value
        else:
            raise UsageError(f"--set {key}: there is no such setting.", fix=_known(key))
    return found


def parse_arguments(entries: Sequence[str]) -> dict[str, str]:
    """`name=value` entries as texts by name."""
    found: dict[str, str] = {}
    for entry in entries:
        name, separator, text = entry.partition("=")
        if not separator or not name.isidentifier():
            raise UsageError(f"--arg {entry!r} is not NAME=VALUE.", fix="write it like --arg lr=3e-4.")
        if name in found:
            raise UsageError(f"--arg {name} is given twice.", fix="give each argument once.")
        found[name] = text
    return found


def write_arguments(args: Mapping[str, Any]) -> list[str]:
    """As `parse_arguments` reads them."""
    odd = next((name for name, value in args.items() if not isinstance(value, _PLAIN)), None)
    if odd is not None:
        raise UsageError(
            f"args: {odd} is a {type(args[odd]).__name__}, which a run folder cannot keep for a resume.",
            fix="give numbers and text, or call the function yourself: train(job(...)).",
        )
    return [f"{name}={value}" for name, value in args.items()]


def write_settings(settings: Mapping[str, Any]) -> list[str]:
    """As `parse_settings` reads them."""
    entries = []
    for key, value in settings.items():
        parts = {f"{key}.{n}": v for n, v in value.items()} if key in _PLAN_GROUPS else {key: value}
        entries += [f"{name}={json.dumps(part)}" for name, part in parts.items()]
    return entries


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Settings, where the second ones win."""
    groups = {key: {**first.get(key, {}), **value} for key, value in second.items() if key in _PLAN_GROUPS}
    return {**first, **second, **groups}


def split_settings(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The job's part, and the plan's."""
    of_plan = {key: value for key, value in settings.items() if key in _PLAN_KEYS}
    of_job = {key: value for key, value in settings.items() if key not in _PLAN_KEYS}
    unknown = next((key for key in of_job if key not in _JOB_KEYS), None)
    if unknown is not None:
        raise UsageError(f"there is no setting {unknown!r}.", fix=_known(unknown))
    return of_job, of_plan


def _known(key: str) -> str:
    near = did_you_mean(key, (*_JOB_KEYS, *SETTINGS))
    return f"{near}of the job: {', '.join(_JOB_KEYS)}; of the plan: {', '.join(SETTINGS)}."
