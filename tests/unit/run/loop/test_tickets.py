"""Shares that workers take as they come, and what the parent writes down of them."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.files.records import read_records
from plait.job.data.loader import Loader
from plait.job.data.open import open_data
from plait.job.order import SampleOrder
from plait.run.loop.tickets import tickets
from plait.run.record.journal import Journal
from plait.run.record.ledger import Ledger, write_left_shares
from plait.run.record.shares import ShareLog


class Numbers(torch.utils.data.IterableDataset[Tensor]):
    """A stream of 11 numbers."""

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor(float(number)) for number in range(11))


def taken(data: Any, order: SampleOrder | None, **limits: Any) -> list[tuple[int, int, bool, list[float]]]:
    """What two workers take in turn, of steps of 4 in 3 shares: (step, share, whether it ends an epoch, samples)."""
    count, source, found = itertools.count().__next__, open_data(data, None), []
    loaders = [
        Loader(source=source, order=order, batch=4, ranks=3, places=tickets(count, 3, 0), depth=1, **limits)
        for _ in range(2)
    ]
    for loader in loaders:
        for loaded in loader:
            (share,) = loaded.micro_batches
            found.append((loaded.step, loaded.share, loaded.ends_epoch, share.batch.tolist()))
        loader.close()
    return found


def test_every_share_is_taken_once_by_whoever_comes() -> None:
    order = SampleOrder(num_samples=11, batch=4, seed=3)
    found = taken([torch.tensor(float(n)) for n in range(11)], order, epochs=2)
    assert sorted(entry[:2] for entry in found) == [(step, share) for step in range(6) for share in range(3)]
    assert {step for step, _, ends, _ in found if ends} == {2, 5}
    for epoch in range(2):
        read = [n for step, _, _, numbers in sorted(found) if step // 3 == epoch for n in numbers]
        assert read == order.epoch_ids(epoch).tolist()


def test_a_stream_is_walked_forward_and_left_at_the_last_step() -> None:
    found = taken(Numbers(), None, stop_step=4)
    assert [entry[:2] for entry in found] == [(step, share) for step in range(4) for share in range(3)]
    assert [n for *_, numbers in found for n in numbers] == [*map(float, range(11)), 0.0, 1.0, 2.0, 3.0]


def share(step: int, number: int, total: float, ended_s: float) -> dict[str, Any]:
    return {
        "step": step, "share": number, "epoch": 0, "total": total, "weight": 2.0, "samples": 2, "lr": 0.1,
        "ended_s": ended_s, "memory_bytes": 1,
    }  # fmt: skip


def test_a_step_is_written_once_all_that_can_come_has_come(tmp_path: Path) -> None:
    with Journal(tmp_path, lambda event: None, keep_below=None, samples=False) as journal:
        rounds = Ledger(journal, 2, None, {})
        rounds.take_share(0, share(1, 0, 3.0, 1.0))
        rounds.take_share(1, share(0, 1, 1.0, 2.0))
        rounds.take_share(0, share(0, 0, 2.0, 3.0))
        assert rounds.losses == {0: 0.75}
        rounds.lose_share(1)
        assert rounds.losses == {0: 0.75, 1: 1.5}
        rounds.take_share(0, share(2, 0, 4.0, 4.0))
        rounds.take_share(0, share(3, 1, 4.0, 4.0))  # never complete
        assert sorted(rounds.losses) == [0, 1, 2]
        rounds.close()
        assert sorted(rounds.losses) == [0, 1, 2, 3]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert rounds.tickets == {0: 4, 1: 1}


def samples_in(folder: Path) -> dict[int, tuple[list[int], list[int]]]:
    entries = read_records(folder / "samples.jsonl").entries
    assert len({entry["step"] for entry in entries}) == len(entries)
    return {entry["step"]: (entry["ids"], entry.get("lost", [])) for entry in entries}


def test_what_a_dead_worker_took_along_is_named(tmp_path: Path) -> None:
    order = SampleOrder(num_samples=16, batch=4, seed=3)
    ids = [order.of_shares(step, 2) for step in range(4)]
    with Journal(tmp_path, lambda event: None, keep_below=None, samples=True) as journal:
        ledger = Ledger(journal, 2, None, {}, order)
        for step, number in ((0, 0), (0, 1), (1, 1), (3, 0), (3, 1)):
            ledger.take_share(number, share(step, number, 1.0, 1.0) | {"ids": ids[step][number]})
        ledger.close(ledger.gaps(0))
    assert samples_in(tmp_path) == {
        0: (ids[0][0] + ids[0][1], []), 1: (ids[1][1], ids[1][0]), 2: ([], ids[2][0] + ids[2][1]),
        3: (ids[3][0] + ids[3][1], []),
    }  # fmt: skip
    assert sorted(number for taken, lost in samples_in(tmp_path).values() for number in taken + lost) == [
        *range(16)
    ]
    assert "3 share(s) of step(s) 2, 3 were not trained on" in (ledger.told_losses() or "")


def test_what_a_failed_run_had_begun_is_left_for_the_next(tmp_path: Path) -> None:
    order = SampleOrder(num_samples=8, batch=4, seed=3)
    log = ShareLog(tmp_path, 0)
    for step, number in ((0, 1), (1, 0)):
        log.write({"share": share(step, number, 1.0, 1.0) | {"ids": order.of_shares(step, 2)[number]}})
    log.close()
    with Journal(tmp_path, lambda event: None, keep_below=None, samples=True) as journal:
        ledger = Ledger(journal, 2, None, {}, order)
        ledger.take_share(1, share(0, 1, 1.0, 1.0))
        ledger.leave()
    assert samples_in(tmp_path) == {}
    told: list[str] = []
    write_left_shares(tmp_path, 1, samples=True, order=order, tell=told.append)
    assert samples_in(tmp_path) == {0: (order.of_shares(0, 2)[1], order.of_shares(0, 2)[0])}
    assert len(told) == 1


def test_a_step_that_is_in_one_file_of_the_journal_alone_is_written_once_to_both(tmp_path: Path) -> None:
    order = SampleOrder(num_samples=8, batch=4, seed=3)
    log = ShareLog(tmp_path, 0)
    for step, number in ((0, 0), (0, 1), (1, 0), (1, 1)):
        log.write({"share": share(step, number, 1.0, 1.0) | {"ids": order.of_shares(step, 2)[number]}})
    log.close()
    with Journal(tmp_path, lambda event: None, keep_below=None, samples=True) as journal:
        journal.write_samples(
            1, 0, [*itertools.chain(*order.of_shares(1, 2))], ()
        )  # the other file was not flushed
    write_left_shares(tmp_path, 2, samples=True, order=order)
    assert samples_in(tmp_path) == {
        step: ([*itertools.chain(*order.of_shares(step, 2))], []) for step in (0, 1)
    }
    assert [entry["step"] for entry in read_records(tmp_path / "metrics.jsonl").entries] == [0, 1]


def test_tickets_end_with_a_whole_step_and_none_that_was_taken_is_dropped() -> None:
    """Three workers, steps of four shares; the run is to stop while all of them hold tickets."""
    counter, stopping, ends = itertools.count(), [False], list[int]()

    def end() -> int | None:
        if not stopping[0]:
            return None
        if not ends:
            ends.append(-(-int(repr(counter)[6:-1]) // 4) * 4)
        return ends[0]

    workers = [tickets(counter.__next__, 4, 10, end) for _ in range(3)]
    used = [next(workers[number % 3]) for number in range(7)]
    stopping[0] = True
    for worker in workers:
        used += worker
    assert sorted(used) == [(10 + number // 4, number % 4) for number in range(8)]


def test_shares_that_a_killed_parent_left_are_written_once_and_only_for_steps_that_are_not_done_again(
    tmp_path: Path,
) -> None:
    for rank in (0, 1):
        log = ShareLog(tmp_path, rank)
        for step in range(4):
            log.write({"share": share(step, rank, 1.0 + rank, 10.0 + step)})
        log.close()
    with Journal(tmp_path, lambda event: None, keep_below=None, samples=False) as journal:
        journal.write_step({"step": 0, "epoch": 0, "loss": 9.0}, torch.empty(0, dtype=torch.int64))
    with (tmp_path / "shares.jsonl").open("a") as torn:
        torn.write('{"torn')
    assert write_left_shares(tmp_path, 3, samples=False) == [1, 2]
    entries = read_records(tmp_path / "metrics.jsonl").entries
    assert [(entry["step"], entry["loss"]) for entry in entries] == [(0, 9.0), (1, 0.75), (2, 0.75)]
    assert not (tmp_path / "shares.jsonl").exists()


def test_a_run_that_starts_anew_does_not_find_the_shares_of_another(tmp_path: Path) -> None:
    log = ShareLog(tmp_path, 0)
    log.write({"share": share(0, 0, 1.0, 1.0)})
    log.close()
    assert write_left_shares(tmp_path, 0, samples=False) == []
    assert not (tmp_path / "shares.jsonl").exists()
    assert not (tmp_path / "metrics.jsonl").exists()
