"""Mutated files are read or refused, never a traceback; `python -m bench.fuzz` tries thousands."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from bench.fuzz.targets import TARGETS, attempt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plait.cluster.files import read_cluster
from plait.errors import PlaitError
from plait.plan.plan import read_plan


@pytest.mark.parametrize("target", TARGETS)
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(min_value=0, max_value=10**9))
def test_mutated_files_are_read_or_refused(target: str, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert attempt(target, seed, Path(folder)) in ("read", "refused")


@settings(max_examples=100, deadline=None)
@given(
    data=st.one_of(
        st.binary(max_size=200), st.text(max_size=200).map(lambda text: text.encode("utf-8", "replace"))
    )
)
def test_any_bytes_are_read_or_refused_by_name(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.yaml"
        path.write_bytes(b"plan: ddp\n" + data)
        told = refusal(lambda: read_plan(path))
        assert told is None or str(path) in told
        path.write_bytes(b"device: A100\n" + data)
        told = refusal(lambda: read_cluster(path))
        assert told is None or str(path) in told


def refusal(read: Callable[[], object]) -> str | None:
    try:
        read()
    except PlaitError as error:
        return error.what
    return None
