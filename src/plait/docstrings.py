"""What is said under the fields of a class, which Python itself does not keep.

In: a class. Out: the docstring under each field; or the class, whose `help()` then shows them.
"""

import ast
import inspect
import textwrap


def docstrings(group: type) -> dict[str, str]:
    """The docstring under each field."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(group))).body
    except (OSError, TypeError):  # a package without its source still runs
        return {}
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        ):
            found[field.target.id] = str(text.value.value)
    return found


def shown_in_help(kind: type) -> None:
    """Have `help(kind)` list its fields with what is said of them."""
    told = docstrings(kind)
    if told and (kind.__doc__ or "").find(_HEADING) < 0:
        lines = [
            f"    {name}\n{textwrap.indent(inspect.cleandoc(text), ' ' * 8)}" for name, text in told.items()
        ]
        kind.__doc__ = "\n".join([inspect.cleandoc(kind.__doc__ or ""), "", _HEADING, *lines])


_HEADING = "Fields:"
