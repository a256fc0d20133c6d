"""Whether code computes a sum over samples: by what it does, not by what numbers show.

In: a function of tensors, those of them whose first dim holds samples. Out: yes where every op is known to treat rows
alone up to sums over them, and only adds and scales these; no of all else. So a yes holds for values that were not
tried.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from plait.torch_private import pytree
from plait.torch_private.dispatch import TorchDispatchMode, heard, unheard
from plait.torch_private.ops import schema_of


class _UnknownError(Exception):
    """Nothing is known of an op."""


@dataclass(frozen=True, slots=True)
class _TensorKind:
    """What a tensor is to the samples."""

    is_of: Literal["nothing", "rows", "sum"]
    """It depends on none; each of its rows on one alone; it is a sum over rows, or a mean."""
    key: Any
    """Tensors with equal keys are equal."""
    root: Any = None
    """Rows of one root and number are those of the same samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
    """A call of an op."""

    name: str
    tags: Sequence[Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    tensors: Sequence[Tensor]
    made: Tensor

    def argument(self, place: int, name: str, default: Any) -> Any:
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)


_SAME = {"clone", "_to_copy", "detach", "alias", "contiguous", "lift_fresh", "view_as"}
_LINEAR = {"add": 2, "sub": 2, "rsub": 2, "neg": 1, "mul": 1, "div": 1}
"""What may be done to sums, and how many of its operands may be sums."""
_LOSSES = {"nll_loss_forward": 3, "nll_loss2d_forward": 3, "mse_loss": 2, "smooth_l1_loss": 2, "huber_loss": 2,
           "binary_cross_entropy": 3, "binary_cross_entropy_with_logits": 4, "soft_margin_loss": 2,
           "multi_margin_loss": 5}  # fmt: skip
"""Losses of rows, and which of their arguments says whether they are summed."""
_REDUCTIONS = {"sum", "mean"}
_DIMS = _REDUCTIONS | {"amax", "amin", "max", "min", "argmax", "argmin", "any", "all", "logsumexp", "var", "std",
                       "var_mean", "linalg_vector_norm", "prod", "norm", "sort", "topk", "argsort", "cumsum",
                       "cumprod", "_softmax", "_log_softmax", "select", "slice", "unsqueeze", "squeeze", "flip",
                       "split", "split_with_sizes", "unbind", "gather", "index_select", "diff", "glu"}  # fmt: skip
"""Ops along dims that they name; along others than the first they treat rows alone."""
_DIM_ARGUMENT = {"topk": 2, "split": 2, "split_with_sizes": 2, "linalg_vector_norm": 2, "norm": 2}
"""Which argument names them; the second of all others."""
_DEFAULT_DIM = {
    **dict.fromkeys(("split", "split_with_sizes", "unbind", "slice"), 0),
    **dict.fromkeys(("topk", "sort", "argsort", "glu", "diff"), -1),
}
_FIRST = {"mm": 0, "addmm": 1, "embedding": 1, "native_layer_norm": 0}
"""Ops that treat the rows of one argument alone, with others that are no rows."""
_VIEWS = {"view", "_unsafe_view", "reshape", "expand"}


def is_sum_over_samples(
    function: Callable[[], Any], samples: Sequence[Tensor], others: Sequence[Tensor], num_samples: int
) -> bool:
    """Whether all tensors that it returns are sums over `samples`, or depend on none of them."""
    proof = _Proof(samples, others, num_samples)
    try:
        with heard(), _Looks(proof), proof:
            found = function()
        return all(proof.of(t).is_of != "rows" for t in pytree.tree_leaves(found) if isinstance(t, Tensor))
    except _UnknownError:
        return False


class _Looks(TorchFunctionMode):
    """Ends where Python sees values beside ops, or how many rows there are where that depends on values."""

    def __init__(self, proof: "_Proof") -> None:
        super().__init__()
        self._proof = proof

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(getattr(func, "__self__", None), "__name__", None) or getattr(func, "__name__", "")
        if name in _VALUES or (name in _COUNTS and isinstance(args[0], Tensor)):
            kind = self._proof.of(args[0])
            if kind.is_of != "nothing" and (name in _VALUES or kind.root not in ("samples", None)):
                raise _UnknownError(name)
        with unheard():
            return func(*args, **(kwargs or {}))


_VALUES = {
    "numpy",
    "__array__",
    "data",
    "data_ptr",
    "untyped_storage",
    "storage",
    "__dlpack__",
    "__deepcopy__",
}
"""What gives values without an op."""
_COUNTS = {"shape", "size", "__len__", "numel", "nelement", "__iter__"}


class _Proof(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, samples: Sequence[Tensor], others: Sequence[Tensor], num_samples: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._num_samples = num_samples
        self._kinds: dict[int, tuple[Tensor, _TensorKind]] = {}
        for number, tensor in enumerate(samples):
            self._set(tensor, _TensorKind("rows", ("input", number), "samples"))
        for number, tensor in enumerate(others):
            self._set(tensor, _TensorKind("nothing", ("other", number)))
        self._given = list(self._kinds.values())

    def of(self, tensor: Tensor) -> _TensorKind:
        """What was found; a tensor that nobody made here is another name of what is known, or was there before."""
        if id(tensor) not in self._kinds:
            if tensor.numel() == 0:
                raise _UnknownError("an empty tensor")
            same = [kind for other, kind in self._given if _is_same(tensor, other)]
            self._set(tensor, same[0] if same else _TensorKind("nothing", ("constant", id(tensor))))
        return self._kinds[id(tensor)][1]

    def _set(self, tensor: Tensor, kind: _TensorKind) -> None:
        self._kinds[id(tensor)] = (tensor, kind)  # which is kept, so that nothing else gets its id

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        tensors = [leaf for leaf in pytree.tree_leaves((args, given)) if isinstance(leaf, Tensor)]
        result = func(*args, **given)
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        name = func.overloadpacket.__name__
        kinds = [self.of(tensor) for tensor in tensors]
        key = (str(func), tuple(kind.key for kind in kinds), _told(args), _told(given))
        if all(kind.is_of == "nothing" for kind in kinds):
            found = _TensorKind("nothing", key)
        elif schema_of(func).is_mutable or len(made) == 0 or torch.Tag.nondeterministic_seeded in func.tags:
            raise _UnknownError(name)
        else:
            call = _Call(name=name, tags=func.tags, args=args, kwargs=given, tensors=tensors, made=made[0])
            is_of, root = self._rule(call)
            found = _TensorKind(is_of, key, root)
        for number, tensor in enumerate(made):
            self._set(tensor, _TensorKind(found.is_of, (found.key, number), found.root))
        return result

    def _rule(self, call: _Call) -> tuple[Literal["rows", "sum"], Any]:
        """What an op of some rows or sums makes, and the root of its rows."""
        kinds = [self.of(tensor) for tensor in call.tensors]
        if call.name in _SAME and len(kinds) == 1:
            return ("sum" if kinds[0].is_of == "sum" else "rows"), kinds[0].root
        if sums := sum(kind.is_of == "sum" for kind in kinds):
            alone = not any(kind.is_of == "rows" for kind in kinds)
            over = call.name == "div" and kinds[0].is_of != "sum"
            if sums > _LINEAR.get(call.name, 0) or not alone or over:
                raise _UnknownError(call.name)
            return "sum", None
        roots = {(self.of(tensor).root, tensor.shape[0]) for tensor in self._rows(call)}
        if len(roots) != 1:
            raise _UnknownError(call.name)
        ((root, _),) = roots
        return self._of_rows(call, root)

    def _rows(self, call: _Call) -> list[Tensor]:
        return [tensor for tensor in call.tensors if self.of(tensor).is_of == "rows"]

    def _of_rows(self, call: _Call, root: Any) -> tuple[Literal["rows", "sum"], Any]:
        name, args, rows = call.name, call.args, self._rows(call)
        if name in _LOSSES:
            if len(rows) != 2 or any(self.of(tensor).is_of != "rows" for tensor in args[:2]):
                raise _UnknownError(
                    name
                )  # targets numbered by where rows are, or weights that are cut like them
            return ("rows" if call.argument(_LOSSES[name], "reduction", 1) == 0 else "sum"), root
        if torch.Tag.pointwise in call.tags or name == "where":
            self._check_pointwise(call)
        elif name in ("index", "masked_select"):
            root = self._chosen(name, args, root)
        elif name in _VIEWS:
            self._check_regrouped(args[0], call.made, root, name)
        elif name in _DIMS:
            return self._along(call, rows), root
        elif name in ("transpose", "permute"):
            if _order(call)[0] != 0:
                raise _UnknownError(name)
        elif name in ("cat", "stack"):
            if len(rows) != len(call.tensors) or call.argument(1, "dim", 0) % call.made.dim() == 0:
                raise _UnknownError(name)
        elif name in _FIRST:
            inside = name != "native_layer_norm" or len(args[1]) < args[0].dim()
            if len(rows) != 1 or rows[0] is not args[_FIRST[name]] or not inside:
                raise _UnknownError(name)
            if name == "addmm" and args[0].dim() != 1:
                raise _UnknownError(name)
        else:
            raise _UnknownError(name)
        return "rows", root

    def _check_pointwise(self, call: _Call) -> None:
        for tensor in call.tensors:
            aligned = tensor.dim() == call.made.dim()
            if self.of(tensor).is_of == "rows":
                fits = aligned and tensor.shape[0] == call.made.shape[0]
            else:  # else it would be numbered by where rows are
                fits = not aligned or tensor.shape[0] == 1
            if not fits:
                raise _UnknownError(call.name)

    def _chosen(self, name: str, args: tuple[Any, ...], root: Any) -> Any:
        """The root of rows that a mask leaves."""
        source, mask = args[0], args[1] if name == "masked_select" else args[1][0]
        if name == "index" and (len(args[1]) != 1 or mask is None):
            others = [self.of(index).is_of for index in args[1] if index is not None]
            if mask is not None or self.of(source).is_of != "rows" or set(others) != {"nothing"}:
                raise _UnknownError(name)
            return root  # along other dims
        if mask.dtype != torch.bool or self.of(mask).is_of != "rows" or self.of(source).is_of != "rows":
            raise _UnknownError(name)
        if mask.shape != source.shape[: mask.dim()]:
            raise _UnknownError(name)
        return ("chosen", self.of(mask).key, root)

    def _check_regrouped(self, source: Tensor, made: Tensor, root: Any, name: str) -> None:
        """Rows may be merged with what is inside of them, and parted again, as long as each is of one sample."""
        before, after = source.shape[0], made.shape[0] if made.dim() else 0
        if name == "expand":
            if source.dim() == made.dim() and before == after and before != 1:
                return
            raise _UnknownError(name)
        known = before if root != "samples" else self._num_samples
        if before == 0 or after == 0 or after % known or known < 2:
            raise _UnknownError(name)

    def _along(self, call: _Call, rows: Sequence[Tensor]) -> Literal["rows", "sum"]:
        name, source = call.name, call.args[0]
        if rows[0] is not source or (len(rows) != len(call.tensors) and name != "index_select"):
            raise _UnknownError(name)
        named = call.argument(_DIM_ARGUMENT.get(name, 1), "dim", _DEFAULT_DIM.get(name))
        size = source.dim() + (1 if name == "unsqueeze" else 0)
        dims = [named] if isinstance(named, int) else list(named or ())
        if dims and 0 not in [dim % size for dim in dims]:
            return "rows"
        if name not in _REDUCTIONS:
            raise _UnknownError(name)
        return "sum"


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    return (
        tensor.data_ptr() == other.data_ptr()
        and tensor.shape == other.shape
        and tensor.stride() == other.stride()
        and tensor.dtype == other.dtype
    )


def _order(call: _Call) -> list[int]:
    """The dims of what is transposed, in their new order."""
    count = call.args[0].dim()
    if call.name == "permute":
        return [dim % count for dim in call.args[1]]
    order, (a, b) = list(range(count)), (dim % count for dim in call.args[1:3])
    order[a], order[b] = order[b], order[a]
    return order


def _told(given: Any) -> Any:
    """What is given beside tensors."""
    leaves = pytree.tree_leaves(given)
    return tuple("tensor" if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
