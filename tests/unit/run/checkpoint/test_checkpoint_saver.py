"""Saving in the background: what is written, what is reported, and that nobody waits."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.run.checkpoint.checkpoint_states import assert_equal, small_state

from plait.run.checkpoint import saver as checkpoint_saver
from plait.run.checkpoint.saver import Notice, Saver
from plait.run.checkpoint.store import load_checkpoint, locate_checkpoint, save_checkpoint


def test_saver_writes_what_was_submitted_while_training_goes_on(tmp_path: Path) -> None:
    saver = Saver(tmp_path, keep=2)
    state = small_state(1)
    saver.submit(state)
    state.parameters["w"].zero_()
    notices = saver.close()
    assert [(notice.kind, notice.step) for notice in notices] == [("saved", 1)]
    assert notices[0].path == tmp_path / "step-00000001"
    assert_equal(load_checkpoint(tmp_path), small_state(1))
    assert Saver(tmp_path).close() == []


def test_what_a_run_began_with_is_not_written_again(tmp_path: Path) -> None:
    paths = [save_checkpoint(tmp_path, small_state(step)) for step in (1, 2)]
    for resumed, is_best, expected in (
        (paths[1], False, []), (paths[1], True, [2]), (paths[0], False, [2]), (None, False, [2])
    ):  # fmt: skip
        saver = Saver(tmp_path, keep=9, resumed=resumed)
        saver.submit(small_state(2), is_best=is_best)
        assert [notice.step for notice in saver.close()] == expected
        if expected:
            paths[1] = locate_checkpoint(tmp_path)


@pytest.fixture
def stuck_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Every save waits until the event is set, as on a network disk that hangs."""
    released, real = threading.Event(), save_checkpoint

    def wait_then_save(*arguments: Any, **options: Any) -> Path:
        released.wait(60)
        return real(*arguments, **options)

    monkeypatch.setattr(checkpoint_saver, "save_checkpoint", wait_then_save)
    yield released
    released.set()


@pytest.mark.timeout(20)
def test_complaint_12_a_save_that_hangs_is_reported_and_blocks_nobody(
    tmp_path: Path, stuck_disk: threading.Event
) -> None:
    saver = Saver(tmp_path, time_limit_s=0.05)
    saver.submit(small_state(1))
    notices: list[Notice] = []
    while not notices:
        notices = saver.poll()
    assert [(notice.kind, notice.step) for notice in notices] == [("slow", 1)]
    assert "limit 50 ms" in notices[0].message
    assert saver.poll() == [], "said once"
    saver.submit(small_state(2))
    saver.submit(small_state(3))
    assert saver.poll() == [], "told together, once the save under way has ended"
    slow, skipped = saver.close()
    assert [(notice.kind, notice.step) for notice in (slow, skipped)] == [("slow", 1), ("skipped", 3)]
    assert skipped.message == "the 2 checkpoints of steps 2 to 3 are skipped: step 1 was still being written"
    assert not list(tmp_path.iterdir())


@pytest.mark.timeout(20)
def test_saver_catches_up_after_a_slow_save(tmp_path: Path, stuck_disk: threading.Event) -> None:
    saver = Saver(tmp_path, time_limit_s=15.0)
    saver.submit(small_state(1))
    while saver._writing is None:
        pass
    saver.submit(small_state(2))
    stuck_disk.set()
    assert [(notice.kind, notice.step) for notice in saver.close()] == [("saved", 1), ("saved", 2)]
    assert load_checkpoint(tmp_path).step == 2


def test_saver_reports_a_failure_and_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.write_text("in the way")
    saver = Saver(folder)
    saver.submit(small_state(1))
    notices: list[Notice] = []
    while not notices:
        notices = saver.poll()
    assert [notice.kind for notice in notices] == ["failed"]
    assert "step 1 cannot be written" in notices[0].message
    folder.unlink()
    saver.submit(small_state(2))
    assert [notice.kind for notice in saver.close()] == ["saved"]


def test_saves_that_fail_one_after_the_other_are_told_twice(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.write_text("in the way")
    saver = Saver(folder)
    for step in range(1, 5):
        saver.submit(small_state(step))
        while not saver._is_idle():
            pass
    first, last = saver.close()
    assert (first.kind, first.step, last.kind, last.step) == ("failed", 1, "failed", 4)
    assert last.message.endswith("(and 2 before it)")
