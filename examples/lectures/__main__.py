"""Run all exhibits, or those named, and write their pages: `python -m examples.lectures [NAME ...]`."""

import importlib
import re
import sys
import time
from pathlib import Path

from examples.lectures.exhibit import LECTURES, Exhibit, page

HERE = Path(__file__).parent
PAGES = HERE.parents[1] / "docs" / "gallery"


def names() -> list[str]:
    """The exhibits, in the order of the lectures."""
    return sorted(path.stem for path in HERE.glob("lecture*_*.py"))


def make(name: str) -> Exhibit:
    """Run one and write its page."""
    module = f"examples.lectures.{name}"
    began = time.monotonic()
    exhibit: Exhibit = importlib.import_module(module).exhibit()
    text, pictures = page(exhibit, module, time.monotonic() - began)
    PAGES.mkdir(exist_ok=True)
    (PAGES / f"{name}.md").write_text(text, encoding="utf-8")
    for old in PAGES.glob(f"{name}_*.svg"):
        old.unlink()
    for file, svg in pictures.items():
        (PAGES / file).write_text(svg, encoding="utf-8")
    return exhibit


def index() -> str:
    """The gallery's first page: every exhibit by lecture, with the first sentence of its idea."""
    lines = ["# The lectures, reproduced", "", _ABOUT, ""]
    for lecture, title in LECTURES.items():
        lines += [f"## {lecture}: {title}", ""]
        for name in names():
            path = PAGES / f"{name}.md"
            if name.startswith(f"lecture{lecture}_") and path.exists():
                text = path.read_text(encoding="utf-8").splitlines()
                first = re.split(r"(?<=[.]) ", text[4], maxsplit=1)[0]
                lines.append(f"- [{text[0][2:]}]({name}.md): {first}")
        lines.append("")
    return "\n".join(lines)


_ABOUT = (
    "plait came from five lectures. Each of their systems, pictures and worked numbers runs here: every number and "
    "picture below was made by a run of this repository, on the date and machine that its page names; `make gallery` "
    "makes them again. Where a lecture's own number is wrong, the page says so and shows why."
)

if __name__ == "__main__":
    chosen = sys.argv[1:] or names()
    unknown = sorted(set(chosen) - set(names()))
    if unknown:
        sys.exit(f"there is no exhibit {', '.join(unknown)}. Fix: one of {', '.join(names())}.")
    for name in chosen:
        began = time.monotonic()
        make(name)
        print(f"docs/gallery/{name}.md  ({time.monotonic() - began:.0f} s)", flush=True)
    (PAGES / "index.md").write_text(index(), encoding="utf-8")
