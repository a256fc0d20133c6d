"""What runs a segment by compiled code: where its tensors are given to that, and what is done if it does not hold.

In: compiled code, the segment. Out: a function that is called as the segment's own.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx

from plait.program.program import Segment
from plait.program.segment.codegen import Fill
from plait.program.segment.layers import Run
from plait.program.segment.standalone import put_together, tensors_of


def plain(segment: Segment) -> Run:
    """What runs a segment as it is written."""
    return segment.run if segment.fillable else lambda args, into: segment.run(args)


def with_memory(
    compiled: Callable[..., Any], segment: Segment, filled: Sequence[tuple[fx.Node, Fill]]
) -> Run:
    """Call what was compiled with the caller's memory behind the inputs, and put that back among the outputs."""
    places = {segment.outputs.index(fill.output): place for place, (_, fill) in enumerate(filled)}
    made = {node.name: node.meta["val"] for node in segment.nodes}
    outputs = [(places.get(at), made[name]) for at, name in enumerate(segment.outputs)]
    are_tensors = not places and all(isinstance(like, Tensor) for _, like in outputs)

    def run(args: list[Any], into: Sequence[Tensor | None] = ()) -> tuple[Any, ...]:
        memory = [tensor for tensor in into if tensor is not None]
        taken = [*tensors_of(args), *memory]
        args.clear()
        results = compiled(taken)
        if are_tensors:
            return tuple(results)
        left = iter(results)
        return tuple(put_together(like, left) if at is None else memory[at] for at, like in outputs)

    return run


def tried(run: Run, segment: Segment, put: Callable[[Run], None], refuse: Callable[[str], None]) -> Run:
    """What runs a segment the first time, and puts `run` in its own place if that went well.

    Where an op's result does not lie as its rule for fake tensors says, the segment runs as written from then on.
    """

    def first(args: list[Any], into: Sequence[Tensor | None] = ()) -> tuple[Any, ...]:
        kept = list(args)
        try:
            found = run(args, into)
        except AssertionError as error:
            refuse(f"an op's result lies otherwise than its rule says: {' '.join(str(error).split())[:200]}")
            put(plain(segment))
            return plain(segment)(kept, into)
        put(run)
        return found

    return first
