"""What mkdocs calls when it builds the site: pages that are made from the code itself are added to those in docs/."""

import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]


def on_config(config: Any) -> Any:
    """Put the pages into the list on the left."""
    sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "src")) if path not in sys.path]
    from docs.plan_pages import families  # mkdocs may be started from anywhere

    plans = next(entry["Plans"] for entry in config.nav if "Plans" in entry)
    plans[:0] = [
        {"All of them": "plans/index.md"},
        *({family: [{name: f"plans/{name}.md"} for name in names]} for family, names in families().items()),
    ]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add what there is beside the files."""
    from docs.plan_pages import pages
    from docs.troubleshooting import page

    for path, text in {**pages(), "troubleshooting.md": page()}.items():
        files.append(File.generated(config, path, content=text))
    return files
