"""Whether a rule is true: its two sides are run, on all small shapes with whole numbers and on random ones in float64.

In: a `Rule`. Out: None, or the case in which its sides differ. Rules are equations of polynomials and of elementwise
functions: whole numbers make no rounding, so small cases are compared to the last bit; random numbers, larger shapes
and other strides come after.
"""

import operator
from collections.abc import Iterator, Mapping
from itertools import product
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from plait.rewrite.rules.language import WORDS, order_of
from plait.rewrite.rules.rule import Rule, Term, parse

_SMALL = (1, 2, 3)
"""Lengths of dims that are all tried together."""
_FEW = 4
"""Dims; of rules with more, fewer lengths are tried together."""
_FURTHER = "yz"
"""Dims that `*` stands for, beside none."""
_LARGEST = 9
"""Lengths of dims that are tried by chance."""
_CLOSE = 1e-12
"""Of the largest value: what other orders of summation may differ by in float64."""


_ARITHMETIC = MappingProxyType({"+": operator.add, "-": operator.sub, "*": operator.mul})


class _NoCaseError(Exception):
    """The terms cannot be built from these values: the rule says nothing of them."""


def counterexample(rule: Rule, *, trials: int = 40, seed: int = 0) -> str | None:
    """A case in which a rule is wrong, in words; None: there is none among those that were tried."""
    generator = torch.Generator().manual_seed(seed)
    cases = 0
    for exact, values in _values(rule, trials, generator):
        try:
            pairs = _sides(rule, values)
        except _NoCaseError:
            continue
        cases += 1
        for left, right in pairs:
            if left.shape != right.shape or not _same(left, right, exact=exact):
                shapes = {k: tuple(v.shape) if isinstance(v, Tensor) else v for k, v in values.items()}
                return f"{rule.name}: {tuple(left.shape)} and {tuple(right.shape)} differ for {shapes}"
    return None if cases else f"{rule.name}: it never applies"


def _same(left: Tensor, right: Tensor, *, exact: bool) -> bool:
    if exact:
        return torch.equal(left, right)
    return bool((left - right).abs().max() <= _CLOSE * left.abs().max().clamp(min=1.0))


def _values(rule: Rule, trials: int, generator: torch.Generator) -> Iterator[tuple[bool, dict[str, Any]]]:
    further = any(own.endswith("*") for own in rule.shapes.values())
    for more in ("", _FURTHER) if further else ("",):
        yield from _shaped(
            {n: own.replace("*", more) for n, own in rule.shapes.items()}, rule, trials, generator
        )


def _shaped(
    shapes: Mapping[str, str], rule: Rule, trials: int, generator: torch.Generator
) -> Iterator[tuple[bool, dict[str, Any]]]:
    letters = sorted({letter for letters in shapes.values() for letter in letters})
    small = _SMALL if len(letters) <= _FEW else _SMALL[:2]
    numbers = rule.numbers or {}
    chosen = [dict(zip(numbers, values, strict=True)) for values in product(*numbers.values())]
    for sizes in product(small, repeat=len(letters)):
        shape = dict(zip(letters, sizes, strict=True))
        for given in chosen:
            tensors = {
                name: torch.randint(-8, 9, [shape[x] for x in own], generator=generator).double()
                for name, own in shapes.items()
            }
            yield True, tensors | given
    for trial in range(trials):
        shape = {x: int(torch.randint(1, _LARGEST + 1, (), generator=generator)) for x in letters}
        tensors = {n: _strided([shape[x] for x in own], generator) for n, own in shapes.items()}
        yield False, tensors | chosen[trial % len(chosen)]


def _strided(shape: list[int], generator: torch.Generator) -> Tensor:
    """Random numbers that lie in memory in a random way: dense, with gaps, or in another order of dims."""
    order = torch.randperm(len(shape), generator=generator).tolist()
    gaps = [1 + int(torch.randint(2, (), generator=generator)) for _ in shape]
    held = torch.randn([shape[d] * gaps[d] for d in order], dtype=torch.float64, generator=generator)
    back = [order.index(d) for d in range(len(shape))]
    made = held.permute(back)
    for dim, gap in enumerate(gaps):
        made = made[(slice(None),) * dim + (slice(None, None, gap),)]
    return made


def _sides(rule: Rule, values: Mapping[str, Any]) -> list[tuple[Tensor, Tensor]]:
    known = dict(values)
    given = [_run(parse(text), known) for text in rule.given]
    for text in rule.when:
        _require(parse(text), known)
    pairs = [(left, _run(parse(text), known)) for left, text in zip(given, rule.gives, strict=False)]
    return pairs + [(known[name], _run(parse(text), known)) for name, text in (rule.parts or {}).items()]


def _require(fact: Term, known: dict[str, Any]) -> None:
    """Make sure that a fact holds; a name that stands for nothing yet is what makes it hold."""
    if fact[0] in ("next", "beside", "head", "weight", "grows"):
        return
    if fact[0] == "then":
        first, second = (order_of(known[name]) for name in fact[1:3])
        if len(first) != len(second):
            raise _NoCaseError
        known[fact[3]] = ",".join(str(first[dim]) for dim in second)
        return
    if fact[0] == "axis":
        order = order_of(known[fact[1]])
        if known[fact[2]] >= len(order):
            raise _NoCaseError
        known[fact[3]] = order[known[fact[2]]]
        return
    if fact[0] == "itself":
        if list(order_of(known[fact[1]])) != sorted(order_of(known[fact[1]])):
            raise _NoCaseError
        return
    if fact[0] == "=" and isinstance(fact[1], str) and fact[1].isidentifier() and fact[1] not in known:
        known[fact[1]] = _run(fact[2], known)
        return
    left, right = (_run(term, known) for term in fact[1:])
    if not (left >= right if fact[0] == ">=" else left == right):
        raise _NoCaseError


def _run(term: Term, known: Mapping[str, Any]) -> Any:
    if isinstance(term, str):
        return known[term] if term in known else _number(term)
    name, args = term[0], [_run(entry, known) for entry in term[1:]]
    if name in _ARITHMETIC:
        return _ARITHMETIC[name](*args)
    if name in ("shape", "size"):
        return tuple(args[0].shape) if name == "shape" else args[0].shape[args[1]]
    if name == "named":
        return order_of(args[0])
    if name in ("vec-get", "vec-length"):
        return args[0][args[1]] if name == "vec-get" else len(args[0])
    word = WORDS[name]
    numbers, tensors = args[: len(word.numbers)], args[len(word.numbers) :]
    if name in ("slice", "cat") and numbers[0] >= tensors[0].ndim:
        raise _NoCaseError
    if name == "slice" and not 0 <= numbers[1] < numbers[2] <= tensors[0].shape[numbers[0]]:
        raise _NoCaseError
    if name == "view":
        tensors = [tensors[0].contiguous()]
    if name == "perm" and len(order_of(numbers[0])) != tensors[0].ndim:
        raise _NoCaseError
    try:
        return word.run(numbers, tensors)
    except RuntimeError:
        if name.startswith("conv") or name in ("add", "view"):  # a kernel larger than its image, other shapes
            raise _NoCaseError from None
        raise


def _number(text: str) -> Any:
    return text.strip('"') if text.startswith('"') else float(text) if "." in text else int(text)
