"""What an engine is asked for.

In: the arguments of `plait` without those of the engine. Out: the command that every task runs. It starts nothing.
"""

import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from plait.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A run that an engine is to start."""

    arguments: tuple[str, ...]
    """Of `plait`: run JOB --plan ddp ..."""
    hosts: int = 1
    ranks: int
    """In all."""
    options: Mapping[str, str] = field(default_factory=dict)
    """For the engine alone."""

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.ranks % self.hosts:
            raise UsageError(
                f"{self.ranks} ranks cannot be spread over {self.hosts} hosts equally.",
                fix="use a number of ranks that --hosts divides.",
            )

    @property
    def command(self) -> list[str]:
        """What every task runs, found without this shell's path."""
        found = shutil.which("plait")
        start = [found] if found else [sys.executable, "-c", "from plait.cli.main import main; main()"]
        return [*start, *self.arguments]

    @property
    def least(self) -> int | None:
        """The fewest ranks of an elastic run; None: it is none."""
        for word, after in zip(self.arguments, (*self.arguments[1:], ""), strict=True):
            name, equals, value = word.partition("=")
            if name == "--elastic":
                text = (value if equals else after).partition(":")[0]
                return int(text) if text.isdigit() else 1
        return None

    def known(self, *names: str) -> Mapping[str, str]:
        """The options, of which the engine knows these."""
        for name in self.options:
            if name not in names:
                raise UsageError(
                    f"--engine-set {name} is not known to this engine.",
                    fix=f"use {', '.join(sorted(names))}.",
                )
        return self.options
