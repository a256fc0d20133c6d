"""What was seen of faults, one by one and as a table."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.chaos.runs import PHASES


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What came of one fault."""

    wrong: list[str]
    """What did not hold."""
    happened: bool
    phase: str
    """In which it was made."""
    seconds: float
    """From there to the end."""


@dataclass
class Tally:
    """What was seen of all faults."""

    held: Counter[tuple[str, str]] = field(default_factory=Counter)
    broken: Counter[tuple[str, str]] = field(default_factory=Counter)
    missed: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Faults that did not happen, and after which all was well."""
    phases: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(kind of fault, phase)"""
    longest: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, kind: str, seen: Seen) -> None:
        """One more fault."""
        (self.broken if seen.wrong else self.held if seen.happened else self.missed)[name, kind] += 1
        if seen.happened:
            self.phases[kind, seen.phase] += 1
            self.longest[kind] = max(self.longest.get(kind, 0.0), seen.seconds)

    def print(self, kinds: Sequence[str], names: Sequence[str]) -> None:
        width = max(len(word) for kind in (*kinds, "missed") for word in kind.split()) + 1
        heads = [(*kind.split(" ", 1), "")[:2] for kind in (*kinds, "all", "missed")]
        print("\n" + " " * 24 + "".join(f"{first:>{width}}" for first, _ in heads))
        print(f"{'held/happened':24}" + "".join(f"{_short(second):>{width}}" for _, second in heads))
        for name in (*names, ""):
            cells = ""
            for kind in (*kinds, ""):
                good, bad = (_sum(counts, name, kind) for counts in (self.held, self.broken))
                cells += f"{f'{good}/{good + bad}' if good + bad else '-':>{width}}"
            print(f"{name or 'all':24}{cells}{_sum(self.missed, name, ''):>{width}}")
        print(f"{'missed':24}" + "".join(f"{_sum(self.missed, '', kind):>{width}}" for kind in kinds))
        print(
            f"\n{'tried in':18}"
            + "".join(f"{phase:>12}" for phase in (*PHASES, "over"))
            + f"{'longest end':>14}"
        )
        for kind in kinds:
            cells = "".join(f"{self.phases[kind, phase] or '-':>12}" for phase in (*PHASES, "over"))
            print(f"{kind:18}{cells}{self.longest.get(kind, 0.0):>12.1f} s")
        happened = self.held.total() + self.broken.total()
        print(f"{self.held.total()} of {happened} held; {self.missed.total()} more were missed")


def _short(words: str) -> str:
    """Without articles: a head of a column."""
    return words.removeprefix("a ").removeprefix("the ").removeprefix("more ")


def _sum(counts: Counter[tuple[str, str]], name: str, kind: str) -> int:
    """Over all names or kinds where none is given."""
    return sum(n for (by, what), n in counts.items() if name in ("", by) and kind in ("", what))
