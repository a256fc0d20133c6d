"""A run folder as a worker leaves it: two ranks, 12 steps of 10 ms, three evaluations."""

import json
from pathlib import Path

import pytest

from plait.trace import Recorder, read_trace, write_chrome

MS = 1_000_000


def write_run(folder: Path, *, num_ranks: int = 2, num_steps: int = 12) -> None:
    """Per step: 0.5 ms data, 3 forward, 4 backward, 1 wait, 1 update, 0.5 nothing; 3 ms of communication."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.yaml").write_text("# a comment\nname: ddp\nbucket_mib: 25\n")
    (folder / "environment.json").write_text(
        json.dumps({"torch": "2.13.0", "device": "cpu", "packages": {"a": "1"}})
    )
    with (folder / "metrics.jsonl").open("w") as lines:
        for step in range(1, num_steps + 1):
            line = {
                "step": step - 1,
                "loss": 2.0 / step,
                "lr": 0.1,
                "samples_per_s": 10.0 if step == 1 else 1000.0 + step,
                "samples": 10,
            }
            line["step_s"] = 10 / float(str(line["samples_per_s"]))
            line |= {"epoch": step // 4, "grad_norm": 1.0, "memory_bytes": 1024 * step}
            lines.write(json.dumps(line) + "\n")
            if step % 4 == 0:
                accuracy = {4: 0.5, 8: 0.9, 12: 0.8}.get(step, 0.1)
                lines.write(
                    json.dumps({"step": step - 1, "evaluate": {"loss": 3.0 / step, "accuracy": accuracy}})
                    + "\n"
                )
    for rank in range(num_ranks):
        recorder = Recorder(rank, offset_ns=0)
        recorder.describe(0, "data", "load")
        recorder.describe(1, "forward", "forward <b>&", micro_batch=0, stage=1)
        recorder.describe(2, "backward", "backward")
        recorder.describe(3, "communication", "all-reduce", "communication", num_bytes=2048)
        recorder.describe(4, "wait", "wait")
        recorder.describe(5, "update", "update")
        for step in range(1, num_steps + 1):
            start = step * 10 * MS
            for instruction, begin, end in (
                (0, 0.0, 0.5),
                (1, 0.5, 3.5),
                (2, 3.5, 7.5),
                (3, 5.5, 8.5),
                (4, 7.5, 8.5),
                (5, 8.5, 9.5),
            ):
                recorder.record(step, instruction, start + int(begin * MS), start + int(end * MS))
        recorder.flush(folder / "trace" / f"rank{rank}.json")
    write_chrome(read_trace(folder), folder / "trace" / "trace.json")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A complete run folder."""
    folder = tmp_path / "run"
    write_run(folder)
    return folder
