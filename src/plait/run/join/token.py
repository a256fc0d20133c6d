"""The secret that the processes of a run share, and where it comes from.

In: the environment and the user's home. Out: a token for one run, derived from a secret: `PLAIT_TOKEN_FILE`, a file
that nobody else may read; `PLAIT_TOKEN`, as plait's own engines hand it to what they start; else the user's key,
made at its first use in the home folder, which hosts of a cluster usually share. It is never printed, never an
argument of a command.
"""

import hmac
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from secrets import token_hex

from plait.errors import UsageError
from plait.run.join.place import Place

_LEAST_BYTES = 16
"""Of a secret: 128 bits cannot be guessed."""
_MOST_BYTES = 1 << 16
"""Of a file with a secret that is read."""
_PORTS = (12_000, 30_000)
"""From and to: below the ports that systems give out by themselves."""
NUM_PORTS = 16
"""Ports that task 0 tries, and the others after it."""


def run_token(place: Place, environment: Mapping[str, str], home: Path) -> bytes:
    """What all tasks of this run know, and nobody else."""
    secret = _secret(environment, home)
    said = f"{place.engine}\n{place.run}"
    return hmac.new(secret, said.encode(), sha256).digest()


def ports_of(token: bytes) -> list[int]:
    """Where task 0 may listen: known to whoever has the token, so that nobody else needs to be asked."""
    low, high = _PORTS
    found = (hmac.new(token, b"port %d" % index, sha256).digest() for index in range(NUM_PORTS))
    return [low + int.from_bytes(digest[:4], "big") % (high - low) for digest in found]


def _secret(environment: Mapping[str, str], home: Path) -> bytes:
    if name := environment.get("PLAIT_TOKEN_FILE"):
        return _read(Path(name))
    if text := environment.get("PLAIT_TOKEN"):
        if len(text) < _LEAST_BYTES:
            raise UsageError(
                f"PLAIT_TOKEN has {len(text)} characters, which can be guessed; {_LEAST_BYTES} are the least.",
                fix="use a random one: openssl rand -hex 32.",
            )
        return text.encode()
    return own_key(home)


def own_key(home: Path) -> bytes:
    """The user's key, made where there is none."""
    path = key_path(home)
    if not path.exists():
        _make(path)
    return _read(path)


def key_path(home: Path) -> Path:
    """Where the user's key is, once it is needed."""
    return home / ".plait" / "key"


def _read(path: Path) -> bytes:
    """A secret that only this user can read."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            content = file.read(_MOST_BYTES).strip()
    except OSError as error:
        raise UsageError(
            f"the run's token cannot be read: {path}: {error.strerror}.",
            fix="point PLAIT_TOKEN_FILE at a file that all hosts of the run have, of mode 0600.",
        ) from error
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO) or status.st_uid not in (os.getuid(), 0):
        raise UsageError(
            f"{path} holds the run's token, and others than you may read or write it.",
            fix=f"chmod 600 {path}",
        )
    if len(content) < _LEAST_BYTES:
        raise UsageError(
            f"{path} holds {len(content)} bytes, which can be guessed; a token has {_LEAST_BYTES} at least.",
            fix=f"write a random one: openssl rand -hex 32 > {path}",
        )
    return content


def _make(path: Path) -> None:
    """The user's key; of several hosts that make it at once, one wins."""
    temporary = path.with_name(f".key-{token_hex(8)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(file, "w") as written:
            written.write(token_hex(32) + "\n")
            written.flush()
            os.fsync(written.fileno())
        with suppress(FileExistsError):
            os.link(temporary, path)
    except OSError as error:
        raise UsageError(
            f"a key for runs over several tasks cannot be made: {path}: {error.strerror}.",
            fix="point PLAIT_TOKEN_FILE at a file of mode 0600 that all hosts of the run have.",
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink()
