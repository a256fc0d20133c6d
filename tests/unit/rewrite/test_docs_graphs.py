"""docs/graphs.md runs as it stands."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "graphs.md"


def test_the_page_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 5
    scope: dict[str, object] = {"__name__": "graphs"}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), scope)
