"""Builds the compiled core of shared memory into the wheel, where there is a C compiler; else it is pure Python."""

import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CoreBuildHook(BuildHookInterface):  # type: ignore[misc]
    """What hatchling calls before it packs a wheel, or installs one that may be edited."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; a wheel that has the library is for this platform, of any Python."""
        source = Path(self.root) / "src/plait/run/native.py"
        spec = importlib.util.spec_from_file_location("plait_native", source)
        assert spec is not None and spec.loader is not None
        native = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(native)
        if native.build(native.library()):
            build_data["pure_python"] = False
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{platform}"
