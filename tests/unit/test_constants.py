"""Every number that the package decides with says what it is and where it comes from."""

import ast
from collections.abc import Iterator
from pathlib import Path

import plait

SOURCE = Path(plait.__file__).parent


def is_number(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Constant):
        return isinstance(value.value, int | float) and not isinstance(value.value, bool)
    if isinstance(value, ast.UnaryOp):
        return is_number(value.operand)
    if isinstance(value, ast.BinOp):
        return is_number(value.left) and is_number(value.right)
    return isinstance(value, ast.Tuple) and bool(value.elts) and all(map(is_number, value.elts))


def unexplained(tree: ast.Module) -> Iterator[str]:
    """Module-level numbers without a docstring under them."""
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.Assign | ast.AnnAssign) and is_number(node.value):
            explained = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if not explained:
                yield f"{node.lineno}: {ast.unparse(node)}"


def test_numbers_say_where_they_come_from() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{text}"
        for path in sorted(SOURCE.rglob("*.py"))
        for text in unexplained(ast.parse(path.read_text()))
    ]
    assert not found, "say under each what it is, and the measurement or the paper:\n" + "\n".join(found)


def test_unexplained_numbers_are_found() -> None:
    source = 'A = 1\nB = 2\n"""Explained."""\nC, D = 1 << 20, -3\nE = True\nF = \'x\'\n'
    assert list(unexplained(ast.parse(source))) == ["1: A = 1", "4: C, D = (1 << 20, -3)"]
