"""Functions of a few sizes, found from examples.

In: points (one size per variable) and a number at each of them. Out: the form that agrees with all: a constant,
a*x + b, k * floor((x + b) / s) + e, q*x*x + a*x + b, or sums and products of these over several variables. Where
several agree on the points but not on a domain, it names a point that tells them apart. It never guesses beyond these.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm, prod

Point = tuple[int, ...]
"""One size per variable."""

_LARGEST_STRIDE = 64
"""Of a floor: five layers of stride 2 make 32."""
_FOR_SQUARES = 5
"""Sizes at which a parabola must hold: it has three numbers of its own."""
_FOR_FLOORS = 7
"""Sizes at which a form with a floor must hold: it has four numbers of its own, and few points fit by chance."""
_TRIED, _MOST_TRIED = 96, 400
"""Points on which forms are compared: of several variables, and of one."""
_STRIDES = (10007, 10009, 10037, 10039)
"""Primes: multiples of them lie all over a domain."""


@dataclass(frozen=True, slots=True)
class Term:
    """(k * floor((a * x + b) / s) + q * x * x + e) / d of one variable; the division by d must leave nothing."""

    variable: int
    k: int
    a: int
    b: int
    s: int
    e: int
    d: int = 1
    q: int = 0

    def __call__(self, point: Point) -> int:
        """Its value, times `d`."""
        x = point[self.variable]
        return self.k * ((self.a * x + self.b) // self.s) + self.q * x * x + self.e

    def over(self, sizes: Iterable[int]) -> list[int | None]:
        """Its values at sizes of its variable, each a whole number or None."""
        a, b, s, k, e, d, q = self.a, self.b, self.s, self.k, self.e, self.d, self.q
        if d == 1:
            return [k * ((a * x + b) // s) + q * x * x + e for x in sizes]
        found = [divmod(k * ((a * x + b) // s) + q * x * x + e, d) for x in sizes]
        return [None if rest else value for value, rest in found]

    def text(self, name: str) -> str:
        """Python source for it, without the division by `d`."""
        inner = name if self.a == 1 else f"{self.a} * {name}"
        inner += f" + {self.b}" if self.b else ""
        inner = f"({inner}) // {self.s}" if self.s > 1 else f"({inner})" if self.b else inner
        if self.k != 1:
            inner = f"{self.k} * ({inner})"
        inner += f" + {self.q} * {name} * {name}" if self.q else ""
        return f"({inner} + {self.e})" if self.e else f"({inner})"


@dataclass(frozen=True, slots=True)
class Form:
    """A sum of products: each of `terms` is a factor, in groups that are added up; then `add`, then divided by `by`."""

    factors: tuple[tuple[Term, ...], ...]
    add: int
    by: int

    def __call__(self, point: Point) -> int | None:
        """Its value; None where it is no whole number, so that the form does not hold there."""
        scale = self._scale()
        total = self.add * scale
        for group in self.factors:
            total += prod(term(point) for term in group) * (scale // prod(term.d for term in group))
        value, rest = divmod(total, self.by * scale)
        return None if rest else value

    def _scale(self) -> int:
        """What all divisions by `d` have in common."""
        return lcm(*(prod(term.d for term in group) for group in self.factors))

    def text(self, names: Sequence[str]) -> str:
        """Python source for its value."""
        scale = self._scale()
        parts = []
        for group in self.factors:
            own = scale // prod(term.d for term in group)
            product = " * ".join(term.text(names[term.variable]) for term in group)
            parts.append(f"{own} * {product}" if own != 1 else product)
        if self.add:
            parts.append(str(self.add * scale))
        total = " + ".join(parts) or "0"
        return f"({total}) // {self.by * scale}" if self.by * scale != 1 else total


@dataclass(frozen=True, slots=True)
class Range:
    """Sizes of one variable."""

    low: int
    high: int
    step: int

    def __contains__(self, size: int) -> bool:
        return self.low <= size <= self.high and (size - self.low) % self.step == 0

    def near(self, size: int) -> int:
        """The member next to a size."""
        steps = round((min(max(size, self.low), self.high) - self.low) / self.step)
        return self.low + steps * self.step


@dataclass(frozen=True, slots=True)
class MorePoints:
    """Several forms agree with what is known: the number at `point` will tell."""

    point: Point


def find(points: Sequence[Point], values: Sequence[int], domain: Sequence[Range]) -> Form | MorePoints | None:
    """The form that gives `values` at `points` and is the only one on `domain`; None: there is none.

    The first point is the one from which variables are changed one by one.
    """
    if len(set(values)) == 1:
        return Form((), values[0], 1)
    base, found = points[0], []
    for variable, sizes in enumerate(domain):
        along = {
            point[variable]: value
            for point, value in zip(points, values, strict=True)
            if point[:variable] == base[:variable] and point[variable + 1 :] == base[variable + 1 :]
        }
        if len(set(along.values())) > 1:
            term = _term(variable, along, sizes)
            if isinstance(term, int):
                return MorePoints((*base[:variable], term, *base[variable + 1 :]))
            if term is None:
                return None
            found.append(term)
    known = list(zip(points, values, strict=True))
    fitting = [f for f in _joined(found, values[0]) if all(f(point) == value for point, value in known)]
    if not fitting:
        return None
    unclear = _telling(fitting, domain)
    return fitting[0] if unclear is None else MorePoints(unclear) if unclear not in points else None


def _term(variable: int, along: Mapping[int, int], sizes: Range) -> Term | int | None:
    """The only form of one variable; or the size that tells the most about which one it is."""
    members = range(sizes.low, sizes.high + 1, sizes.step)
    members = members[:: 1 + len(members) // _MOST_TRIED]
    behaviours: dict[tuple[int | None, ...], Term] = {}
    for term in _terms(variable, along):
        behaviours.setdefault(tuple(term.over(members)), term)
    if len(behaviours) <= 1:
        only = next(iter(behaviours.items()), None)
        if only is None or None in only[0]:
            return None
        needed = _FOR_SQUARES if only[1].q else _FOR_FLOORS if only[1].s > 1 else 0
        return only[1] if len(along) >= min(needed, len(members)) else _between(along, sizes)
    largest = [max(Counter(column).values()) for column in zip(*behaviours, strict=True)]
    best = members[largest.index(min(largest))]
    return best if best not in along else None


def _between(along: Mapping[int, int], sizes: Range) -> int:
    """A size in the middle of the widest gap between those that are known."""
    known = sorted(along)
    gaps = [(after - before, before) for before, after in itertools.pairwise(known)]
    width, before = max(gaps)
    return sizes.near(before + width // 2)


def _terms(variable: int, along: Mapping[int, int]) -> Iterator[Term]:
    """The forms of one variable: straight lines of whole slope alone where one fits, else with floors."""
    (x0, y0), *rest = along.items()
    x1, y1 = next((x, y) for x, y in rest if y != y0)
    slope = Fraction(y1 - y0, x1 - x0)
    start = y0 - slope * x0
    straight = all(slope * x + start == y for x, y in along.items())
    if straight:
        d = slope.denominator * start.denominator
        yield Term(variable, 1, int(slope * d), 0, 1, int(start * d), d)
        if slope.denominator == 1:
            return
    square = _square(variable, along)
    if square is not None:
        yield square
        return
    for s in range(2, _LARGEST_STRIDE + 1):
        for b in range(s):
            t0, t1 = (x0 + b) // s, (x1 + b) // s
            if t0 == t1 or (y1 - y0) % (t1 - t0):
                continue
            k = (y1 - y0) // (t1 - t0)
            e = y0 - k * t0
            if all(k * ((x + b) // s) + e == y for x, y in along.items()):
                yield Term(variable, k, 1, b, s, e)


def _square(variable: int, along: Mapping[int, int]) -> Term | None:
    """The parabola of whole numbers through three points and more."""
    (x0, y0), (x1, y1), *rest = along.items()
    if not rest:
        return None
    x2, y2 = rest[0]
    first, second = Fraction(y1 - y0, x1 - x0), Fraction(y2 - y1, x2 - x1)
    q = (second - first) / (x2 - x0)
    slope = first - q * (x0 + x1)
    start = y0 - slope * x0 - q * x0 * x0
    if q == 0 or any(part.denominator != 1 for part in (q, slope, start)):
        return None
    if any(q * x * x + slope * x + start != y for x, y in along.items()):
        return None
    return Term(variable, 1, int(slope), 0, 1, int(start), 1, int(q))


def _joined(terms: Sequence[Term], first: int) -> Iterator[Form]:
    """Terms of several variables, each with the others at the first point, as one: sums, products, and a mix."""
    if len(terms) == 1:
        yield Form(((terms[0],),), 0, 1)
        return
    if first:
        yield Form((tuple(terms),), 0, first ** (len(terms) - 1))
    yield Form(tuple((term,) for term in terms), -(len(terms) - 1) * first, 1)
    if len(terms) > 2 and first:
        for alone in terms:  # alone * (the sum of the others)
            others = [term for term in terms if term is not alone]
            shift = Term(alone.variable, alone.k, alone.a, alone.b, alone.s, alone.e, alone.d)
            less = -(len(others) - 1) * first
            constant = Term(alone.variable, 0, 0, 0, 1, less)
            yield Form((*((shift, term) for term in others), (shift, constant)), 0, first)


def _telling(candidates: Sequence[Form], domain: Sequence[Range]) -> Point | None:
    """A point of the domain at which forms differ, or fail; None: they are the same on it."""
    sizes = [range(entry.low, entry.high + 1, entry.step) for entry in domain]
    for number in range(_TRIED if len(candidates) > 1 else 0):
        point = tuple(
            entry[(number * _STRIDES[at % len(_STRIDES)]) % len(entry)] for at, entry in enumerate(sizes)
        )
        if len({form(point) for form in candidates}) > 1:
            return point
    return None
