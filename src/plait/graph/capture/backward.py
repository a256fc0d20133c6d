"""What torch cannot do without values in the backward of a step: told with the line and the module of the forward op.

In: what was raised while gradients were traced. Out: a `CaptureError`, and where there is something to run eagerly.
"""

import linecache
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate

from torch import fx

from plait.errors import CaptureError
from plait.folders import can_be_named
from plait.graph.capture.islands import Islands
from plait.graph.capture.refusal import reason_of
from plait.graph.rewrite.marks import origin_of_last
from plait.torch_private.fake import DynamicOutputShapeException
from plait.torch_private.tracing import tracer

_COUNTED = "compute that with torch.where to have it captured; "


@contextmanager
def differentiating(islands: Islands) -> Iterator[None]:
    """Around autograd; code of the user's own in it has lines by itself."""
    try:
        yield
    except Exception as error:
        origin = origin_of_last(tracer().graph)
        own = any(can_be_named(frame) for frame, _ in traceback.walk_tb(error.__traceback__))
        if origin is None or own or not origin.meta["source"]:
            raise
        path = origin.meta["module"]
        islands.stack = ("", *(accumulate(path.split("."), "{}.{}".format) if path else ()))
        raise _explained(error, origin) from error


def _explained(error: Exception, origin: fx.Node) -> CaptureError:
    line = origin.meta["source"]
    file, _, number = line.rpartition(":")
    return CaptureError(
        f"the model cannot be captured: the gradient of {line}: `{linecache.getline(file, int(number)).strip()}` "
        f"({reason_of(error)}).",
        where=line,
        fix=f"{_COUNTED if isinstance(error, DynamicOutputShapeException) else ''}plans single and ddp run it eagerly.",
    )
