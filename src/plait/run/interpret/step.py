"""The step that a rank is at: its program, its samples, and what is worked out once for a program.

In: a program, a rank's share of the batch. Out: a `Step`, which instructions are executed within.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.errors import JobError
from plait.job.data.share import Share
from plait.latest import Latest
from plait.plan.plan import DATA
from plait.program.cost.memory import at_hand_bytes
from plait.program.cost.places import places_of
from plait.program.instructions import Collective, Instruction, Update
from plait.program.program import Bucket, Program, RankProgram, Spec
from plait.program.sized import Numbers
from plait.program.value import Value
from plait.run.hold.state import ModelState
from plait.run.link.links import Links
from plait.torch_private import pytree

_APART = 1024
"""Bytes between what is fetched of one value and of the next, at most: of each, an optimizer keeps a few tensors."""
_PROGRAMS = 16
"""Programs of which a rank remembers what it has worked out: memory is bounded."""
_SIZES = 4096
"""Sizes of the micro-batches of a step that are remembered of one program."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """What is worked out once for a program, which is kept, so that no other gets its id."""

    own: RankProgram
    constants: dict[Value, Tensor]
    """As the model holds them: on its device, in its dtype."""
    places: dict[Value, tuple[Bucket, int]]
    """Gradients that may be made in their bucket, and where."""
    parts: dict[int, list[str]]
    """Parameters that are updated together, by the first of their buckets, where the update comes in parts."""
    at_hand: int | None
    """Bytes that may be fetched from the host at once: what the program promises, and where each tensor begins. None:
    it depends on sizes."""
    met: Latest[tuple[tuple[int, ...], ...], bool]
    """Sizes with which the program was executed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One step of one rank."""

    number: int
    program: Program
    own: RankProgram
    """This rank's part of the program."""
    known: Known
    shares: Sequence[Share]
    """This rank's samples, by micro-batch."""
    numbers: Sequence[Numbers]
    """Of each micro-batch, where the program follows their sizes."""
    coordinates: Sequence[tuple[str, int]]
    """Where this rank is on each axis; none of a server's."""
    is_new: bool
    """Whether it is the first of its program and sizes: a GPU loads kernels."""

    @property
    def instructions(self) -> Sequence[Instruction]:
        """What to do, in this order."""
        sized = self.own.sized
        return (
            self.own.instructions
            if sized is None
            else sized.instructions(self.own.instructions, self.numbers)
        )

    def described(self, instruction: Instruction, values: Sequence[Value]) -> list[Spec]:
        """What the tensors of a message are like."""
        if self.own.sized is None:
            return [self.own.values[value] for value in values]
        assert instruction.micro_batch is not None
        numbers = self.numbers[instruction.micro_batch]
        return [self.own.sized.described(value, self.own.values[value], numbers) for value in values]


class Steps:
    """Makes the steps of one rank."""

    def __init__(self, rank: int, state: ModelState) -> None:
        self._rank, self._state = rank, state
        self._known = Latest[int, Known](_PROGRAMS)
        self._now: Step | None = None

    @property
    def now(self) -> Step:
        """The one that is executed, or was last."""
        assert self._now is not None, "no step is executed"
        return self._now

    def begin(self, program: Program, number: int, shares: Sequence[Share]) -> Step:
        """A step of a program with this rank's samples."""
        own, axes = program.of(self._rank), [name for name, _ in program.plan.mesh.axes]
        on_mesh = own.serve is None
        known = self._known_of(program, own)
        sized, leaves = own.sized, [leaves_of(share) for share in shares]
        sizes = () if sized is None else tuple(map(sized.sizes, leaves))
        is_new = known.met.get(sizes) is None
        known.met.put(sizes, True)
        self._now = Step(
            number=number,
            program=program,
            own=own,
            known=known,
            shares=shares,
            numbers=() if sized is None else tuple(map(sized.numbers, leaves)),
            is_new=is_new,
            coordinates=tuple(zip(axes, program.plan.mesh.coordinates(self._rank), strict=True))
            if on_mesh
            else (),
        )
        return self._now

    def _known_of(self, program: Program, own: RankProgram) -> Known:
        known = self._known.get(id(own))
        if known is None:
            device, dtype = self._state.device, self._state.dtype
            places = places_of(own, program.layout.zero)
            known = Known(
                own=own,
                constants={
                    value: tensor.to(
                        device, dtype if tensor.is_floating_point() and dtype == torch.float64 else None
                    )
                    for value, tensor in own.constants.items()
                },
                at_hand=at_hand_bytes(own) + _APART * len(own.values) if own.sized is None else None,
                parts={
                    i.parts[0]: [name for index in i.parts for name in own.buckets[index].parameters]
                    for i in own.instructions
                    if isinstance(i, Update) and i.parts
                },
                places={value: (own.buckets[index], position) for value, (index, position) in places.items()},
                met=Latest(_SIZES),
            )
            self._known.put(id(own), known)
        return known


def leaves_of(share: Share) -> list[Tensor]:
    """The tensors of a share of a micro-batch."""
    return [leaf for leaf in pytree.tree_leaves(share.batch) if isinstance(leaf, Tensor)]


def compare_sizes(step: Step, links: Links) -> Iterator[None]:
    """Refuse micro-batches of other extents on other ranks of `data`, where these compute on them together."""
    compared = [step.shares[at] for at in sorted(step.own.same_sizes)]
    own = [extent for share in compared for leaf in leaves_of(share) for extent in leaf.shape[1:]]
    ranks = step.program.plan.data_ranks
    meeting = Collective(
        id=-1, name="compare sizes", kind="communication", op="all_gather", axis=DATA, extents=(len(own),) * ranks
    )  # fmt: skip
    handle = links.start(meeting, torch.tensor(own))
    while not handle.ready():
        yield
    found = handle.result().view(ranks, -1)
    if not bool((found == found[0]).all()):
        told = "; ".join(f"share {at}: {row.tolist()}" for at, row in enumerate(found))
        raise JobError(
            f"step {step.number + 1}: shares are padded to different sizes ({told}), and ranks compute on them "
            "together: batch statistics or whole tensors.",
            fix="let `collate` pad all samples to one size, or set batch_norm='local'.",
        )
