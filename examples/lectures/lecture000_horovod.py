"""Horovod's script, lecture 000: written for Horovod, run by plait with its import line changed; also on Spark.

python -m examples.lectures.lecture000_horovod
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from examples.digits_mlp import accuracy, digits, network
from examples.lectures.exhibit import Exhibit, Number, Table, show
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import plait.horovod as hvd  # was: import horovod.torch as hvd

EPOCHS, RANKS = 6, 2


def script() -> dict[str, float]:
    """As Horovod's documentation has it: a rate by size, a sampler by rank, broadcasts, the wrapped optimizer."""
    hvd.init()
    torch.manual_seed(hvd.rank())  # on purpose not the same: the broadcast must make it so
    data = digits()
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data, hvd.size(), hvd.rank())
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    model = network()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    images, labels = digits(held_out=True).tensors
    own = sum(float(w.detach().double().sum()) for w in model.parameters())
    apart = float((hvd.allreduce(torch.tensor(own), op=hvd.Average) - own).abs())
    return {"accuracy": accuracy(model(images), labels).item(), "ranks": float(hvd.size()), "apart": apart}


def under_torchrun() -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="plait-lecture-") as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS),
                   "-m", "examples.lectures.lecture000_horovod", "--write", str(out)]  # fmt: skip
        subprocess.run(
            command, check=True, timeout=110, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        found: dict[str, float] = json.loads(out.read_text())
        return found


def on_spark() -> dict[str, float] | str:
    """The same function on Spark's executors; or why not."""
    if importlib.util.find_spec("pyspark") is None:
        return "there is no pyspark here: pip install plait[spark], and Java 17"
    import plait.horovod.spark as spark

    found: dict[str, float] = spark.run(script, num_proc=RANKS)[0]
    return found


def exhibit() -> Exhibit:
    torchrun, spark = under_torchrun(), on_spark()
    rows: list[list[float | str]] = [["torchrun", torchrun["ranks"], torchrun["accuracy"], torchrun["apart"]]]
    rows.append(
        ["Spark", spark, "", ""]
        if isinstance(spark, str)
        else ["Spark", *(spark[k] for k in ("ranks", "accuracy", "apart"))]
    )
    return Exhibit(
        lecture="000",
        title="Horovod's script, with one line changed",
        idea="Horovod scales a script for one worker to many: a broadcast at the start, an optimizer "
        "that averages gradients. The same names stand on plait's own links, under torchrun, srun, "
        "mpirun, and on Spark by `plait.horovod.spark.run(function)`.",
        numbers=[
            Number(what="held-out accuracy on two processes", ours=torchrun["accuracy"]),
            Number(
                what="difference of weights between them",
                ours=torchrun["apart"],
                note="both began with other seeds",
            ),
        ],
        tables=[Table(title="Started by", columns=["engine", "ranks", "accuracy", "apart"], rows=rows)],
        texts={"The line": "-import horovod.torch as hvd\n+import plait.horovod as hvd"},
        seen=f"Spark was not tried in this run: {spark}."
        if isinstance(spark, str)
        else "On Spark the same function ran in two barrier tasks of a local session (pyspark, Java 17).",
    )


if __name__ == "__main__":
    if "--write" in sys.argv:
        result = script()
        if hvd.rank() == 0:
            Path(sys.argv[sys.argv.index("--write") + 1]).write_text(json.dumps(result))
    else:
        show(exhibit())
