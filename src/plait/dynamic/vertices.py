"""`Vertices`: one function of a vertex, evaluated over graphs that differ from sample to sample.

In: a module that is the function of one vertex, the graphs of a batch. Out: the states of all vertices. Vertices of one
level are one call, so a batch of trees costs as many calls as the highest has levels (Cavs: Xu et al., ATC 2018).
"""

import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from plait.dynamic.cells import plain_cells
from plait.dynamic.counts import Scheduled, Scheduling
from plait.dynamic.evaluate import Work, evaluated
from plait.dynamic.forest import Forest, read_batch
from plait.dynamic.one_by_one import states_one_by_one
from plait.dynamic.row_graphs import RowFunction
from plait.dynamic.rows import row_function
from plait.dynamic.schedule import Family, Schedule, scheduled
from plait.dynamic.structure import Reader, Structure, refuse_tracing
from plait.errors import DataError, JobError, located

_MOST_FUNCTIONS = 64
"""Traced functions that one `Vertices` keeps; the oldest goes first."""

State = Tensor | tuple[Tensor, ...]


class States:
    """The states of a batch's vertices: tensors, or tuples of them where a state has several parts."""

    def __init__(self, schedule: Schedule, rows: tuple[Tensor, ...], *, single: bool) -> None:
        self._schedule, self._rows, self._single = schedule, rows, single

    @property
    def all(self) -> State:
        """Of every vertex, sample by sample, in the order in which the sample has them."""
        return self._taken(self._schedule.vertices)

    @property
    def roots(self) -> State:
        """Of the vertices that no other one sees: one a sample for trees."""
        return self._taken(self._schedule.roots)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Vertices of each sample."""
        return self._schedule.sizes

    @property
    def num_roots(self) -> tuple[int, ...]:
        """Roots of each sample."""
        return self._schedule.num_roots

    def of(self, sample: int) -> State:
        """Of the vertices of one sample."""
        start = sum(self.sizes[:sample])
        return self._taken(self._schedule.vertices[start : start + self.sizes[sample]])

    def _taken(self, index: Tensor) -> State:
        taken = tuple(rows.index_select(0, index.to(rows.device)) for rows in self._rows)
        return taken[0] if self._single else taken


class Vertices(Scheduled):
    """Evaluates `cell`, a function of one vertex, at all vertices of all samples, level by level.

    `cell(own_input, states)` is plain PyTorch for one vertex: its input (None where it has none) and the states of what
    it sees, one after the other in the first dim (a tensor, or a tuple of them where `state` has several). It gives the
    vertex's own state. A mapping of kinds to modules is used where vertices are of several kinds. `state` is the size
    of a state, or a tuple of sizes. Called with the graphs of a batch, see `Structure` and `Reader`, it gives `States`;
    `inputs=` takes the place of the inputs that graphs bring: a row for each vertex with one, sample by sample.

        tree = plait.Vertices(cell, state=(128, 128))
        hidden, _ = tree([((3, 1), 4), (2, 7)]).roots          # two trees with numbers at their leaves
    """

    def __init__(
        self,
        cell: nn.Module | Mapping[Any, nn.Module],
        state: int | Sequence[int | Sequence[int]],
        *,
        children: Callable[[Any], Iterable[Any] | None] | None = None,
        input: Callable[[Any], Any] | None = None,
        kind: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__()
        self._kinds: tuple[Any, ...] | None = None
        if isinstance(cell, nn.Module) and not isinstance(cell, nn.ModuleDict):
            self.cell: nn.Module = cell
        else:
            self._kinds = tuple(cell)
            self.cell = nn.ModuleList(cell[kind] for kind in self._kinds)
        self._single = isinstance(state, int)
        sizes = (state,) if isinstance(state, int) else tuple(state)
        self._shapes = tuple((size,) if isinstance(size, int) else tuple(size) for size in sizes)
        self._reader = Reader(children=children, input=input, kind=kind)
        self._functions: dict[Any, list[RowFunction]] = {}
        self._untraced: str | None = None
        self._is_random: dict[bool, bool] = {}
        """In training and not: whether functions draw random numbers, as far as is known."""

    def __getstate__(self) -> dict[str, Any]:
        kept: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {**kept, "_functions": {}, "last": None}

    def forward(self, graphs: Iterable[Any], inputs: Tensor | None = None) -> States:
        refuse_tracing()
        began = time.perf_counter()
        given = list(graphs)
        if not given:
            raise DataError("there is no graph in the batch.", fix="give at least one sample.")
        forest = read_batch(given, self._read, plain=self._kinds is None and self._reader == Reader())
        batched = self.batched and self._untraced is None
        merges = batched and inputs is None and not self._is_random.get(self.training)
        schedule = scheduled(forest, len(self._shapes), merges=merges)
        self._note(
            Scheduling(
                num_vertices=schedule.num_vertices,
                group_sizes=tuple(group.num_rows for group in schedule.groups),
                schedule_s=time.perf_counter() - began,
                level_sizes=schedule.level_sizes,
            )
        )
        examples = self._examples()
        rows = self._inputs(forest, inputs, examples[0].device)
        states = None
        if batched:
            try:
                functions = self._traced(schedule, examples, rows)
                if merges and (
                    functions is None or self._is_random[self.training]
                ):  # known now: each by itself
                    schedule = scheduled(forest, len(self._shapes), merges=False)
                states = None if functions is None else self._batched(schedule, functions, examples, rows)
            except Exception:
                with torch.no_grad():  # raises at the vertex that is to blame, and names it
                    states_one_by_one(schedule, self._called, examples, rows)
                raise
        if states is None:
            states = states_one_by_one(schedule, self._called, examples, rows)
        return States(schedule, states, single=self._single)

    def _read(self, number: int, graph: Any) -> Structure:
        try:
            sample = self._reader.read(graph)
        except Exception as error:
            raise located(error, f"sample {number} of the batch")  # noqa: B904 - the same error
        unknown = [name for name in sample.names if self._kinds is not None and name not in self._kinds]
        if unknown:
            raise DataError(
                f"sample {number} of the batch: vertex {_first_of(sample, unknown[0])} is of kind {unknown[0]!r}; "
                f"there are functions for {', '.join(map(repr, self._kinds or ()))}.",
                fix="add one for it to the mapping of cells.",
            )
        return sample

    def _examples(self) -> tuple[Tensor, ...]:
        like = next((p for p in self.cell.parameters() if p.is_floating_point()), torch.empty(0))
        return tuple(torch.empty(shape, dtype=like.dtype, device=like.device) for shape in self._shapes)

    def _inputs(self, forest: Forest, inputs: Tensor | None, device: torch.device) -> Tensor | None:
        if inputs is None:
            return forest.inputs.to(device) if forest.inputs is not None else None
        if len(inputs) != forest.has_input.sum():
            raise DataError(
                f"inputs= has {len(inputs)} rows; {forest.has_input.sum()} vertices of the batch have an input.",
                fix="give one row for each vertex that has an input, sample by sample.",
            )
        return inputs

    def _tensors(self) -> dict[str, Tensor]:
        return {**dict(self.cell.named_parameters()), **dict(self.cell.named_buffers())}

    def _traced(
        self, schedule: Schedule, examples: tuple[Tensor, ...], inputs: Tensor | None
    ) -> dict[Family, RowFunction] | None:
        """The functions of all families; None: one cannot be traced."""
        parameters = self._tensors()
        functions = {
            family: self._function(family, parameters, examples, inputs) for family in schedule.num_rows
        }
        traced = {family: function for family, function in functions.items() if function is not None}
        self._is_random[self.training] = any(function.is_random for function in traced.values())
        return traced if len(traced) == len(functions) else None

    def _batched(
        self,
        schedule: Schedule,
        functions: Mapping[Family, RowFunction],
        examples: tuple[Tensor, ...],
        inputs: Tensor | None,
    ) -> tuple[Tensor, ...]:
        parameters = self._tensors()
        work = Work(
            groups=schedule.groups,
            functions=functions,
            num_rows=schedule.num_rows,
            buffers=tuple((schedule.total_rows, example) for example in examples),
        )
        own: dict[Family, tuple[Tensor, ...]] = {}
        for family, number in schedule.num_rows.items():
            if family.has_input and inputs is not None:
                own[family] = (inputs[schedule.inputs[family].to(inputs.device)],)
            elif not family.num_children:
                own[family] = (examples[0].new_zeros(number),)
        with torch.autocast(examples[0].device.type, enabled=False):
            return evaluated(work, parameters, own)

    def _function(
        self,
        family: Family,
        parameters: Mapping[str, Tensor],
        examples: Sequence[Tensor],
        inputs: Tensor | None,
    ) -> RowFunction | None:
        own = [inputs[0]] if family.has_input and inputs is not None else []
        key = (
            *(family.kind, self.training, torch.is_autocast_enabled(examples[0].device.type)),
            *(
                (value.dtype, value.device, tuple(value.shape), value.requires_grad)
                for value in (*own, *examples)
            ),
            *((value.dtype, value.requires_grad) for value in parameters.values()),
        )
        known = self._functions.setdefault(key, [])
        for function in known:
            if function.fits(family.num_children):
                return function

        number = family.num_children
        # With neither input nor children nothing says how many rows there are: one number each does.
        given = [value.detach() for value in own] or ([examples[0].new_zeros(())] if not number else [])

        def of(parameters: dict[str, Tensor], own: list[Tensor], states: list[Tensor]) -> Sequence[Tensor]:
            seen = states if number else [like.new_empty((0, *like.shape)) for like in examples]
            return self._called(family, own if family.has_input else (), seen, parameters)

        try:
            with plain_cells(self.cell):
                function = row_function(
                    of, parameters, given, examples if number else (), number or None, examples
                )
        except JobError:
            raise
        except Exception as error:  # whatever the user's code and torch's tracer make of each other
            self._untraced = (
                f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
            )
            warnings.warn(
                f"the function of a vertex cannot be batched and runs one by one: {self._untraced}",
                stacklevel=4,
            )
            return None
        known.append(function)
        if sum(map(len, self._functions.values())) > _MOST_FUNCTIONS:
            self._functions.pop(next(iter(self._functions)))
            warnings.warn(  # Python shows it once
                f"more than {_MOST_FUNCTIONS} kinds and shapes of vertices came; those that return are traced again, "
                "which takes long. Fix: use fewer kinds, or inputs of one shape.",
                stacklevel=4,
            )
        return function

    def _called(
        self,
        family: Family,
        own: Sequence[Tensor],
        states: Sequence[Tensor],
        parameters: Mapping[str, Tensor] | None = None,
    ) -> Sequence[Tensor]:
        cell, prefix = self.cell, ""
        if self._kinds is not None:
            at = self._kinds.index(family.kind)
            cell, prefix = self.cell[at], f"{at}."  # type: ignore[index]
        arguments = (own[0] if own else None, states[0] if self._single else tuple(states))
        if parameters is None:
            made = cell(*arguments)
        else:
            owned = {
                name[len(prefix) :]: value for name, value in parameters.items() if name.startswith(prefix)
            }
            made = functional_call(cell, owned, arguments)
        parts = (made,) if isinstance(made, Tensor) else tuple(made)
        shapes = tuple(tuple(part.shape) for part in parts)
        if shapes != self._shapes or isinstance(made, Tensor) != self._single:
            raise JobError(
                f"the function of a vertex{_told(family)} gives {_listed(shapes)}; "
                f"its state is {_listed(self._shapes)}.",
                fix="give all vertices states of one shape, that of state=.",
            )
        return parts


def _told(family: Family) -> str:
    kind = "" if family.kind is None else f" of kind {family.kind!r}"
    return f"{kind} with {family.num_children} children"


def _listed(shapes: Sequence[Sequence[int]]) -> str:
    return " and ".join(str(tuple(shape)) for shape in shapes)


def _first_of(sample: Structure, name: Any) -> int:
    return int((sample.kinds == sample.names.index(name)).argmax())
