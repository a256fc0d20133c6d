"""Private names of torch are used in `plait/torch_private/` and nowhere else: the source is read, not run."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import plait
from plait.torch_private import TRIED

ROOM = Path(plait.__file__).parent / "torch_private"
PRIVATE = re.compile(r"_[a-z0-9]\w*", re.IGNORECASE)
PYTHONS_OWN = {"_asdict", "_exit", "_fields", "_getframe", "_initializing"}
"""Names with an underscore that Python documents."""
SPARKS = {"_jsc"}
"""How pyspark's own libraries reach its JVM."""


def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(ROOM.parent.rglob("*.py"))}


def private_uses(tree: ast.AST, ours: set[str]) -> Iterator[tuple[int, str]]:
    """Lines that use a name which is neither public nor made by us."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = ["" if is_op_name(node) or node.attr in ours else f"torch.{node.attr}"]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            plain = re.fullmatch(r"torch(\.\w+)+|_[a-z]\w*", node.value) and node.value not in ours
            names = [f"torch.{node.value}"] if plain and is_looked_up(node) else []
        else:
            continue
        for name in names:
            parts = name.split(".")
            hidden = [p for p in parts[1:] if PRIVATE.fullmatch(p) or p == "experimental"]
            if parts[0] == "torch" and hidden and not set(hidden) <= PYTHONS_OWN | SPARKS:
                yield node.lineno, name


def is_op_name(node: ast.Attribute) -> bool:
    """`aten._softmax`: an op by its name, which is data of a graph; not `aten.mm.out._op`."""
    owner = ast.unparse(node.value)
    return owner == "aten" or re.fullmatch(r"torch\.ops\.\w+", owner) is not None


def is_looked_up(node: ast.Constant) -> bool:
    """Whether a string is the name of an attribute or of a module: `getattr(x, "_y")`, `x.__dict__["_y"]`."""
    parent = getattr(node, "parent", None)
    if isinstance(parent, ast.Call):
        return ast.unparse(parent.func).rpartition(".")[2] in {"getattr", "setattr", "hasattr", "getLogger"}
    return isinstance(parent, ast.Subscript) and "__dict__" in ast.unparse(parent.value)


def names_of_ours(all_trees: dict[Path, ast.Module]) -> set[str]:
    """Names with an underscore that the package itself defines."""
    ours = {"_asdict", "_fields", "_replace"}  # of named tuples
    for tree in all_trees.values():
        for node in ast.walk(tree):
            for child in ast.iter_child_nodes(node):
                child.parent = node  # type: ignore[attr-defined]
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                ours.add(node.name)
            elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
                ours.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return ours


def test_private_names_of_torch_are_used_in_one_folder() -> None:
    everything = trees()
    ours = names_of_ours(everything)
    found = [
        f"{path.relative_to(ROOM.parent)}:{line}: {name}"
        for path, tree in everything.items()
        if ROOM not in path.parents
        for line, name in private_uses(tree, ours)
    ]
    assert not found, "move these behind plait/torch_private/:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "from torch._ops import OpOverload",
        "from torch.utils import _pytree as pytree",
        "from torch.fx.experimental.proxy_tensor import make_fx",
        "import torch.distributed._tools",
        "torch._foreach_add_([], [])",
        "node.target._schema.name",
        "torch.ops.aten.mm.out._op",
        "getattr(op, '_schema', None)",
        "shadow.__dict__['_opt_called'] = True",
        "logging.getLogger('torch._subclasses.fake_tensor')",
    ],
)
def test_private_uses_are_found(source: str) -> None:
    tree = ast.parse(source)
    assert list(private_uses(tree, names_of_ours({Path("x.py"): tree})))


@pytest.mark.parametrize("source", ["aten._softmax.default", "sys._getframe(1)", "class A:\n _x = 1\nA._x"])
def test_public_uses_are_not_found(source: str) -> None:
    tree = ast.parse(source)
    assert not list(private_uses(tree, names_of_ours({Path("x.py"): tree})))


def test_this_torch_is_within_the_versions_that_were_tried() -> None:
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    oldest, newest = (tuple(int(part) for part in tried.split(".")) for tried in (TRIED[0], TRIED[-1]))
    assert oldest <= version <= newest, "try plait/torch_private/ on this torch, then add it to TRIED"
