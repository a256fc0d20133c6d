"""What Inductor's compilers of C++ write is there whole or not at all. Private to torch (`torch._inductor`).

Torch has them write where the library is looked for, so that one whose linker was killed, or found no room, is loaded
ever after, in vain; where it was made to see which instructions a processor knows, code runs without them, in silence.
"""

import functools
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any


@functools.cache
def build_whole() -> None:
    """From now on they write beside it, and the file gets its name when it is done."""
    from torch._inductor.cpp_builder import CppBuilder  # seconds to import

    exact = CppBuilder.build

    def build(self: Any) -> None:
        target, output = self._target_file, self._output
        if self._use_relative_path or target not in output:
            exact(self)
            return
        part = f"{target}.{os.getpid()}"
        self._output = output.replace(target, part)
        try:
            exact(self)
            os.replace(part, target)
        finally:
            self._output = output
            with suppress(FileNotFoundError):
                os.unlink(part)

    CppBuilder.build = build  # type: ignore[method-assign]


def cut_off_in(folder: Path, error: Exception) -> Path | None:
    """The library in a folder that an error says cannot be loaded: another program's linker was killed."""
    named = re.search(r"(?:ImportError|OSError): (/.+?\.so): ", str(error))
    return Path(named[1]) if named is not None and Path(named[1]).is_relative_to(folder) else None
