"""The content of a file after a few changes.

In: bytes, and a source of random choices. Out: other bytes: of values replaced by others of other types, numbers that
are not finite, dates, deep nests, names that look like markup; of bytes flipped, cut out and doubled; of references
that grow exponentially.
"""

import json
import random
from collections.abc import Callable
from typing import Any

import yaml

NASTY: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**25, 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf"), "",
    " ", "²", "٣", "1e9", "0x1F", "2024-01-01", "12:30:45", "yes", "~", "[/red]", "[bold]x", "../../etc/passwd", "\x00",
    "x" * 5000, "\ud800", "🦆", [], {}, [[]], [1, "a", None], {"a": 1}, {"": {}}, {"²": "²"}, ["x"] * 300,
)  # fmt: skip
TOKENS = (
    b"[" * 5000, b"{" * 3000, b"{a: " * 2000, b"\xff\xfe", b"\x00", b"&a [*a]", b"!!python/object/apply:os.system [x]",
    b"<<: *x", b"? [a]\n: b\n", b"---\n", b"\t", b"NaN", b"Infinity", b"-.inf", b"1e999", b"9" * 5000, b"2024-01-01",
    b"\xc2\xb2", b"\r\n", b"'", b'"', b"#", b"%YAML 9.9\n", b"*", b"|\n", b"\xef\xbb\xbf", b"\xed\xa0\x80",
    b": ", b"- ",
)  # fmt: skip
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(20)
)


def mutated(
    data: bytes, rng: random.Random, parse: Callable[[bytes], Any], dump: Callable[[Any], bytes]
) -> bytes:
    """The content after a few changes, of its values or of its bytes."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if rng.random() < 0.6:
            try:
                tree = parse(data)
                data = dump(_with_one_changed(tree, rng))
                continue
            except Exception:  # it is broken already, or what was put into it cannot be written
                pass
        data = with_bytes_changed(data, rng)
    return data


def _with_one_changed(tree: Any, rng: random.Random) -> Any:
    """One value replaced, dropped, renamed or wrapped."""
    if rng.random() < 0.15 or not isinstance(tree, (dict, list)) or not tree:
        nasty = rng.choice(NASTY)
        return rng.choice((nasty, nasty, [tree], {"a": tree}, _nested(tree, rng.choice((20, 40, 200)))))
    keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
    key = rng.choice(keys)
    changed = dict(tree) if isinstance(tree, dict) else list(tree)
    how = rng.random()
    if how < 0.1:
        del changed[key]
    elif how < 0.2 and isinstance(changed, dict):
        changed[rng.choice((*(n for n in NASTY if isinstance(n, (str, int, float)) or n is None), "x"))] = (
            changed.pop(key)
        )
    elif how < 0.25 and isinstance(changed, list):
        changed += changed[:50]
    else:
        changed[key] = _with_one_changed(tree[key], rng)
    return changed


def _nested(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = [value]
    return value


def with_bytes_changed(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    end = min(len(data), at + rng.choice((1, 2, 10, 100)))
    match rng.randrange(6):
        case 0:
            return data[:at] + bytes(rng.randrange(256) for _ in range(end - at)) + data[end:]
        case 1:
            return data[:at] + data[end:]
        case 2:
            return data[:at]
        case 3:
            return data[:end] + data[at:]
        case 4:
            return data[:at] + rng.choice(TOKENS) + data[at:]
        case _:
            return BOMB.encode() + data if rng.random() < 0.2 else data[:at] + rng.choice(TOKENS) + data[end:]


def yaml_dump(tree: Any) -> bytes:
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True).encode()


def json_dump(tree: Any) -> bytes:
    return json.dumps(tree).encode()
