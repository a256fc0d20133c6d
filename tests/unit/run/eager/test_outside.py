"""A forward that asks for the time, opens files, or draws from generators that steps do not own, is told."""

import datetime
import importlib.metadata
import os
import random
import sys
import time
import uuid
from collections.abc import Callable
from contextvars import ContextVar
from datetime import date
from pathlib import Path
from time import perf_counter

import numpy
import pytest
import torch
from tests.ordinary import STEPS, Base, job
from tests.unit.run.eager.test_against_eager import difference, plain_loop
from torch import Tensor

from plait.errors import CaptureError
from plait.graph.from_job import Captures
from plait.plan.named import resolve
from plait.run.proof.serial_run import run_serially
from plait.run.verify import verify


class Scaled(Base):
    factor: Callable[[], float]

    def middle(self, h: Tensor) -> Tensor:
        return h * self.factor()


class ByTime(Scaled):
    def factor(self) -> float:
        return time.time() % 7


class ByCounter(Scaled):
    def factor(self) -> float:
        return 1 + perf_counter() % 2


class ByDate(Scaled):
    def factor(self) -> float:
        return 1 + datetime.datetime.now().minute + datetime.datetime(2020, 1, 2).day


class ByToday(Scaled):
    """The class itself, as most people import it."""

    def factor(self) -> float:
        return float(date.today().toordinal())


class ByCalendar(Scaled):
    def factor(self) -> float:
        return float(time.localtime().tm_yday + 1)


class Dated(Scaled):
    """A log's line is nobody's input."""

    def factor(self) -> float:
        made = datetime.datetime.now(datetime.UTC)
        return float(isinstance(made, datetime.datetime) and issubclass(datetime.datetime, date))


class Timed(Scaled):
    """What it takes is nobody's input."""

    def factor(self) -> float:
        began = perf_counter()
        took = time.time_ns() - began
        return 0.5 if took > 0 else 0.25


class ByFile(Scaled):
    def factor(self) -> float:
        return len(Path(__file__).read_text()) % 7 + 1.0


@pytest.mark.parametrize("model", [ByTime, ByCounter, ByDate, ByToday, ByCalendar])
def test_a_step_that_computes_with_the_time_is_not_captured(model: type[Scaled]) -> None:
    with pytest.raises(CaptureError, match=r"computes with the time \(.*test_outside\.py:\d+\)"):
        Captures(job(model)).of_size(4)


def test_a_step_that_only_looks_at_the_clock_is_captured() -> None:
    Captures(job(Timed)).of_size(4)
    Captures(job(Dated)).of_size(4)
    assert datetime.datetime.now().__class__ is datetime.datetime
    assert date is datetime.date
    assert time.time is not None and perf_counter is time.perf_counter


def test_a_step_that_reads_a_file_runs_eagerly() -> None:
    made = job(ByFile)
    record = run_serially(made, resolve("single", 1), STEPS, torch.float32)
    assert difference(made, plain_loop(job(ByFile)), record) is None
    assert "opens a file" in record.notices[0] and "test_outside.py" in record.notices[0]


class BySystem(Scaled):
    def factor(self) -> float:
        return 1.0 + os.urandom(1)[0] + uuid.uuid4().int % 7


FADING = ContextVar("FADING", default=1.0)


class ByContext(Scaled):
    def factor(self) -> float:
        FADING.set(FADING.get() * 0.5)
        return FADING.get()


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (BySystem, r"draws random numbers of the system \(.*test_outside\.py:\d+\)"),
        (ByContext, r"changes Python state, .*FADING"),
    ],
)
def test_what_a_graph_would_draw_or_count_once_is_not_captured(model: type[Scaled], told: str) -> None:
    with pytest.raises(CaptureError, match=told):
        Captures(job(model)).of_size(4)
    assert FADING.get() == 1.0


class Imports(Scaled):
    """What is read to import something is none of its inputs, nor which version of a package is here."""

    def factor(self) -> float:
        sys.modules.pop("colorsys", None)
        return importlib.import_module("colorsys").ONE_THIRD + len(importlib.metadata.version("torch")) * 0


def test_a_step_that_imports_something_is_captured() -> None:
    Captures(job(Imports)).of_size(4)


class ByNumpy(Scaled):
    def factor(self) -> float:
        return float(numpy.random.rand()) + random.random()


def test_what_is_drawn_from_generators_of_the_process_repeats_and_is_told() -> None:
    numpy.random.seed(1)
    first, second = (run_serially(job(ByNumpy), resolve("ddp", 2), 2, torch.float32) for _ in range(2))
    assert first.losses == second.losses and len(set(first.losses)) == 2
    (line,) = [text for text in first.notices if "draws from" in text]
    assert "Python's `random` and `numpy.random`: seeded anew for every micro-batch" in line
    outcome = verify(job(ByNumpy), "ddp", 2, serial=True, steps=2)
    assert outcome.ok, outcome


class PicksRows(Base):
    """Needs values in a layer, which runs eagerly inside of a captured step."""

    def __init__(self) -> None:
        super().__init__()
        self.picks = Picks()

    def middle(self, h: Tensor) -> Tensor:
        picked: Tensor = self.picks(h)
        return picked


class Picks(torch.nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h * float(len(h[:, 0][h[:, 0] > -1e9].tolist()) > 0)


def made_with_the_world() -> torch.nn.Module:
    """Real networks are made with seeds, files and clocks."""
    torch.manual_seed(len(Path(__file__).read_text()) + int(time.time() * 0))
    return PicksRows()


@pytest.mark.parametrize("plan", ["single", "ddp"])
def test_what_is_asked_while_a_model_is_made_is_no_part_of_a_step(plan: str) -> None:
    """Layers that run eagerly are those of a model that is made while the step is traced."""
    given = job(made_with_the_world)
    captures = Captures(given)
    captures.of_size(4)
    assert "picks" in captures.islands.notices()[0]
    found = run_serially(given, resolve(plan, 1 if plan == "single" else 2), STEPS, torch.float32)
    assert difference(given, plain_loop(given), found) is None
