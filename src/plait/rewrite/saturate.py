"""Equality saturation: all that rules make of a graph's terms, in classes of equal ones.

In: `Terms`, rules. Out: `Classes`: of each class, the ways to compute it. egglog does the work; it stops when nothing
new is found or when there is too much, never by the clock: what is there by then is true all the same, and the same in
every process.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from plait.errors import PlanError
from plait.rewrite.rules.language import WORDS, order_of
from plait.rewrite.rules.rule import HEADER, Rule, as_egglog
from plait.rewrite.terms import Terms, neighbours, weights

_ROUNDS = 24
"""Times that all rules are tried at most."""
_AT_ONCE = 50
"""Terms that are told to egglog in one rule."""
_MOST_WAYS = 400
"""Matches of rules, for every term of the graph, at which it stops."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to compute a class."""

    word: str
    numbers: tuple[Any, ...]
    """Of an opaque op or an input: the number of its term."""
    tensors: tuple[int, ...]
    """Classes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Classes:
    """What is equal to what."""

    ways: list[list[Way]]
    """Of each class."""
    of_term: list[int]
    """The class of every term of the graph."""
    whole: bool
    """Whether nothing new was left to find."""


def saturate(terms: Terms, rules: Sequence[Rule], *, alike: bool = False) -> Classes:
    """All that `rules` make of `terms`, up to a number of ways; `alike`: neighbours have one shape."""
    bindings = _egglog()
    egraph = bindings.EGraph()
    arities = sorted({len(term.tensors) for term in terms.terms if term.word == "op"})
    lines = [HEADER, "(ruleset facts)", *(f"(constructor op{n} (i64{' T' * n}) T)" for n in arities)]
    lines += [as_egglog(rule) for rule in rules]
    egraph.run_program(*egraph.parse_program("\n".join(lines)))
    for start in range(0, len(terms.terms), _AT_ONCE):
        _enter(egraph, terms, range(start, min(start + _AT_ONCE, len(terms.terms))))
    made = weights(terms)
    pairs = [f"(weight (term {at}))" for at in sorted(made)]
    follows = [pair for pair in neighbours(terms) if not alike or terms.have_one_shape(*pair)]
    later = {second for _, second in follows}
    pairs += [f"(head (term {first}))" for first, _ in follows if first not in later]
    pairs += [f"(next (term {first}) (term {second}))" for first, second in follows]
    pairs += _orders(terms)
    egraph.run_program(*egraph.parse_program(f"(rule () ({' '.join(pairs)}) :ruleset facts) (run facts 1)"))
    matches, most, changed = 0, _MOST_WAYS * len(terms.terms), True
    (step,) = egraph.parse_program("(run 1)")
    for _ in range(_ROUNDS):
        (output,) = egraph.run_program(step)
        matches += sum(output.report.num_matches_per_rule.values())
        changed = output.report.updated
        if not changed or matches > most:
            break
    return _read(json.loads(egraph.serialize([]).to_json()), whole=not changed)


def _orders(terms: Terms) -> list[str]:
    """What egglog has to be told of orders of dims and of shapes, which are text to it."""
    given = {word: {t.numbers[0] for t in terms.terms if t.word == word} for word in ("perm", "view")}
    facts = [f'(set (named "{text}") (vec-of {text.replace(",", " ")}))' for text in given["view"] if text]
    known, every = sorted(given["perm"]), set(given["perm"])
    for one, two in product(known, known):
        first, second = order_of(one), order_of(two)
        if len(first) == len(second):
            both = ",".join(str(first[dim]) for dim in second)
            facts.append(f'(then "{one}" "{two}" "{both}")')
            every.add(both)
    for text in every:
        facts += [f'(axis "{text}" {now} {before})' for now, before in enumerate(order_of(text))]
        if list(order_of(text)) == sorted(order_of(text)):
            facts.append(f'(itself "{text}")')
    return sorted(facts)


def _enter(egraph: Any, terms: Terms, part: range) -> None:
    """Tell some terms in one rule: egglog settles everything after each command, and reads long rules slowly."""
    facts = []
    for at in part:
        facts.append(f"(union (term {at}) {_written(at, terms)})")
        value = terms.nodes[at].meta.get("val")
        if isinstance(value, torch.Tensor) and value.ndim:
            facts.append(f"(set (shape (term {at})) (vec-of {' '.join(map(str, value.shape))}))")
    egraph.run_program(*egraph.parse_program(f"(rule () ({' '.join(facts)}) :ruleset facts)"))


def _egglog() -> Any:
    try:
        import egglog.bindings as bindings
    except ImportError as error:
        raise PlanError(
            "rewrite=on needs egglog, which is not installed.", fix="pip install 'plait[rewrite]'."
        ) from error
    return bindings


def _written(at: int, terms: Terms) -> str:
    """A term as egglog reads it; what is opaque is known by the number of its first term."""
    term = terms.terms[at]
    tensors = [f"(term {source})" for source in term.tensors]
    if term.word == "in":
        return f"(in {at})"
    if term.word == "op":
        return f"(op{len(tensors)} {' '.join([str(at), *tensors])})"
    numbers = [
        f'"{number}"' if isinstance(number, str) else repr(float(number) if sort == "f64" else number)
        for number, sort in zip(term.numbers, WORDS[term.word].numbers, strict=True)
    ]
    return f"({' '.join([term.word, *numbers, *tensors])})"


def _read(content: dict[str, Any], *, whole: bool) -> Classes:
    nodes = content["nodes"]
    number_of: dict[str, int] = {}
    ways: list[list[Way]] = []

    def number(key: str) -> int:
        if key not in number_of:
            number_of[key] = len(ways)
            ways.append([])
        return number_of[key]

    of_term: dict[int, int] = {}
    for node in nodes.values():
        word = node["op"]
        opaque = word == "in" or (word.startswith("op") and word[2:].isdigit())
        if not opaque and word not in WORDS and word != "term":
            continue
        values, tensors = [], []
        for child in node["children"]:
            found = nodes[child]
            if found["eclass"].startswith("T-"):
                tensors.append(number(found["eclass"]))
            else:
                values.append(_number(found["op"]))
        own = number(node["eclass"])
        if word == "term":
            of_term[values[0]] = own
        else:
            ways[own].append(Way("op" if opaque and word != "in" else word, tuple(values), tuple(tensors)))
    numbers = _in_order(ways, [of_term[at] for at in range(len(of_term))])
    ordered: list[list[Way]] = [[] for _ in ways]
    for own, entries in enumerate(ways):
        renamed = [Way(w.word, w.numbers, tuple(numbers[s] for s in w.tensors)) for w in entries]
        ordered[numbers[own]] = sorted(renamed, key=_key)
    return Classes(ways=ordered, of_term=[numbers[of_term[at]] for at in range(len(of_term))], whole=whole)


def _key(way: Way) -> tuple[str, str, tuple[int, ...]]:
    return way.word, repr(way.numbers), way.tensors


def _in_order(ways: Sequence[Sequence[Way]], of_term: Sequence[int]) -> dict[int, int]:
    """New numbers of classes that are the same in every process: terms first, then what is made of them."""
    numbers: dict[int, int] = {}
    for own in of_term:
        numbers.setdefault(own, len(numbers))
    left = [own for own in range(len(ways)) if own not in numbers]
    while left:
        known = {
            own: min(found)
            for own in left
            if (
                found := [
                    (w.word, repr(w.numbers), tuple(numbers[s] for s in w.tensors))
                    for w in ways[own]
                    if all(s in numbers for s in w.tensors)
                ]
            )
        }
        assert known, "a class that nothing leads to"
        for own in sorted(known, key=known.__getitem__):
            numbers[own] = len(numbers)
        left = [own for own in left if own not in numbers]
    return numbers


def _number(text: str) -> Any:
    if text.startswith('"'):
        return text[1:-1]
    try:
        return int(text)
    except ValueError:
        return float(text)
