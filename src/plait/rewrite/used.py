"""Which rules a chosen graph owes its ways to.

In: classes, the way of each that was chosen, those that were written. Out: by rule, how many classes are computed the
way it says and were not before. Rules that found something which was not chosen are not among them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from plait.rewrite.rules.language import WORDS
from plait.rewrite.rules.rule import Rule, Term, parse
from plait.rewrite.saturate import Classes, Way
from plait.rewrite.solve import Choice

Bound = Mapping[str, Any]
"""What variables stand for: classes and numbers."""


def rules_used(classes: Classes, choice: Choice, written: Choice, rules: Sequence[Rule]) -> dict[str, int]:
    """Rules one of whose sides is in the chosen graph, where the other was."""
    new = [(own, classes.ways[own][index]) for own, index in choice.items() if written.get(own) != index]
    found: dict[str, int] = {}
    for rule in rules:
        sides = [(parse(left), parse(right)) for left, right in zip(rule.given, rule.gives, strict=False)]
        count = len(
            {own for own, way in new for left, right in sides if _made_by(own, way, left, right, classes)}
        )
        if count:
            found[rule.name] = count
    return found


def _made_by(own: int, way: Way, left: Term, right: Term, classes: Classes) -> bool:
    """Whether a class is computed as `right` says, and `left` is equal to it; parts of a merged op are in others."""
    part = right[0] == "slice"
    core = right[-1] if part else right
    if isinstance(core, str) or core[0] != way.word:
        return False
    return any(
        part or next(_at_class(left, own, classes, bound), None) is not None
        for bound in _at_way(core, way, classes, {})
    )


def _at_class(term: Term, own: int, classes: Classes, bound: Bound) -> Iterator[Bound]:
    """What variables stand for where some way of a class is like a term."""
    if isinstance(term, str):
        if bound.get(term, own) == own:
            yield {**bound, term: own}
        return
    for way in classes.ways[own]:
        if way.word == term[0]:
            yield from _at_way(term, way, classes, bound)


def _at_way(term: Term, way: Way, classes: Classes, bound: Bound) -> Iterator[Bound]:
    count = len(WORDS[way.word].numbers)
    for given, number in zip(term[1 : 1 + count], way.numbers, strict=True):
        if not isinstance(given, str):
            continue  # worked out from others
        if given.isidentifier():
            if bound.get(given, number) != number:
                return
            bound = {**bound, given: number}
        elif given.strip('"') != str(number):
            return
    every: list[Bound] = [bound]
    for given, source in zip(term[1 + count :], way.tensors, strict=True):
        every = [after for before in every for after in _at_class(given, source, classes, before)]
    yield from every
