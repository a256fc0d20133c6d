"""Every message that a user can see, with what to do about it: read from the code when the site is built.

In: the sources of plait. Out: a page, a table for each kind of error. Names in braces are filled in when it is told.
"""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import plait
from plait import errors

SOURCE = Path(plait.__file__).parent
KINDS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.PlaitError)
}
SHORT = 12
"""Characters of a message's own words, below which nobody would find it here."""


def messages() -> dict[str, list[tuple[str, str]]]:
    """By kind of error: (what it says, what to do), in the order of the alphabet."""
    found: dict[str, set[tuple[str, str]]] = {name: set() for name in KINDS}
    for path in sorted(SOURCE.rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(call, ast.Call)
                and isinstance(call.func, ast.Name)
                and call.func.id in KINDS
                and call.args
            ):
                what = _text(call.args[0])
                fix = next((_text(given.value) for given in call.keywords if given.arg == "fix"), "")
                if len("".join(_own_words(what))) >= SHORT:
                    found[call.func.id].add((what, fix))
    return {name: sorted(pairs) for name, pairs in found.items() if pairs}


def _own_words(text: str) -> Iterator[str]:
    """What is not filled in."""
    for part in text.split("{"):
        yield part.partition("}")[2] if "}" in part else part


def _text(node: ast.expr) -> str:
    """A string as it is written, with what is filled in as {name}; empty where it is made elsewhere."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            "{" + _name(part.value) + "}" if isinstance(part, ast.FormattedValue) else _text(part)
            for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return ""


def _name(node: ast.expr) -> str:
    """The last name in an expression, which says what it is about."""
    names = [part.attr if isinstance(part, ast.Attribute) else part.id for part in ast.walk(node)
             if isinstance(part, ast.Attribute | ast.Name)]  # fmt: skip
    return names[0].strip("_") if names else "…"


def page() -> str:
    """The page, as Markdown."""
    lines = [
        "# Troubleshooting by message", "",
        "What plait says when something is wrong, and what to do about it, read from its code when this page was made. "
        "Words in braces are filled in. Look for the words of your message; the search above finds them too. An error "
        "of a rank names the rank, the step (counted from 1) and your own line; `--debug`, anywhere on the command "
        "line, shows where in plait it came from.", "",
    ]  # fmt: skip
    for name, pairs in messages().items():
        lines += [
            f"## {name}",
            "",
            inspect.getdoc(KINDS[name]) or "",
            "",
            "| message | what to do |",
            "|---|---|",
        ]
        lines += [f"| {_cell(what)} | {_cell(fix) or '–'} |" for what, fix in pairs]
        lines.append("")
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Text of a table in Markdown, shown as it is."""
    for sign in "\\`*_[]<>|":
        text = text.replace(
            sign, f"\\{sign}" if sign not in "<>|" else {"<": "&lt;", ">": "&gt;", "|": "&#124;"}[sign]
        )
    return " ".join(text.split())
