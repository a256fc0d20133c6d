"""Which cluster of Ray a run takes, and one of its own where there is none.

In: an address, or nothing. Out: a connection. Ray takes code from whoever reaches it, and trusts what it is connected
to: one of another user is not taken unless it is named, and one that is started here has a token and a folder that
nobody else can read.
"""

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from secrets import token_hex
from typing import Any

from plait.errors import RunError
from plait.files.scratch import scratch_folder

_QUIET = {"log_to_driver": False, "logging_level": "error"}
_ROOT = Path("/tmp")
"""Of a cluster's folder: the names of sockets in it may have 107 bytes."""


@contextmanager
def connected(ray: Any, address: str | None, cpus: int, say: Callable[[str], None]) -> Iterator[None]:
    """For the block: to the cluster at `address`, to the one that runs here, or to one of its own with `cpus`."""
    if ray.is_initialized():
        yield
        return
    found = address or address_here(
        Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or _ROOT), say
    )
    with ExitStack() as stack:
        if found is not None:
            try:
                ray.init(address=found, **_QUIET)
            except ConnectionError as error:
                if address:
                    raise RunError(f"there is no cluster of Ray at {address}: {error}.") from error
        if not ray.is_initialized():
            folder = stack.enter_context(scratch_folder(_ROOT))
            _guard(say)
            own = folder / "ray"  # to which it gives everybody the right to write, but nobody comes there
            ray.init(address="local", num_cpus=cpus, _temp_dir=str(own), **_QUIET)
        stack.callback(ray.shutdown)  # before its folder goes
        yield


def address_here(root: Path, say: Callable[[str], None]) -> str | None:
    """Of the cluster that `ray start` began on this host: it stands in a folder that anybody can write to."""
    path = root / "ray" / "ray_current_cluster"
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(file, "rb") as opened:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            return None
        if status.st_uid not in (0, os.geteuid()):
            say(
                f"ray: {path} is of another user (id {status.st_uid}), so the cluster that it names is left alone; "
                "to use it, name it: --engine-set address=HOST:PORT"
            )
            return None
        return opened.read(256).decode("utf-8", errors="replace").strip() or None


def _guard(say: Callable[[str], None]) -> None:
    """Have the cluster that is about to start take nobody without a token: Ray itself asks for one where nobody has
    said otherwise, but keeps it in a file that others can read. Its processes inherit this one by their environment."""
    if "RAY_AUTH_MODE" in os.environ:
        return
    os.environ["RAY_AUTH_TOKEN"] = token_hex(32)
    if not _asks_for_token():
        say(
            "ray: this version listens on all interfaces and runs what anybody sends; update it: pip install -U ray"
        )


def _asks_for_token() -> bool:
    try:
        module = import_module("ray._private.authentication.authentication_token_setup")
    except ImportError:
        return False
    return hasattr(module, "enable_token_auth_by_default")
