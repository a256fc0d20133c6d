"""A script that was written for Horovod, with its import line changed: means of gradients, and data that is uneven."""

import json
from pathlib import Path

import pytest
import torch
from examples.lectures import lecture000_horovod
from tests.ranks.hosts.hosts import PLAIT, ended, start_tasks

import plait.horovod as hvd
from plait.errors import UsageError

pytestmark = pytest.mark.timeout(150)

SCRIPT = """
import json, torch
import plait.horovod as hvd

hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1, betas=(0.8, 0.9))
if hvd.rank() == 0:
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
step = float(optimizer.state_dict()["state"][0]["step"])
for number in range(2 + hvd.rank()):
    optimizer.zero_grad()
    model(torch.full((1, 3), float(hvd.rank() + 1))).sum().backward()
    optimizer.synchronize()
    gradient = model.bias.grad.item()
    with optimizer.skip_synchronize():
        optimizer.step()
last = hvd.join()
found = {
    "place": [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()],
    "mean": hvd.allreduce(torch.tensor([1.0 + hvd.rank()])).tolist(),
    "sum": hvd.allreduce(torch.tensor([1 + hvd.rank()]), op=hvd.Sum).tolist(),
    "gathered": hvd.allgather(torch.full((1 + hvd.rank(), 2), float(hvd.rank()))).tolist(),
    "sent": hvd.broadcast(torch.tensor([float(hvd.rank())]), root_rank=1).tolist(),
    "object": hvd.broadcast_object({"epoch": 3} if hvd.rank() == 0 else None),
    "counts": hvd.allreduce(torch.tensor([4097]), op=hvd.Sum, compression=hvd.Compression.fp16).tolist(),
    "gradient": gradient, "step": step, "last": last, "betas": optimizer.param_groups[0]["betas"] == (0.8, 0.9),
}
print(json.dumps(found))
hvd.shutdown()
"""


def test_a_script_of_horovods(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    found = ended(start_tasks([PLAIT[0], script], 2, tmp_path), timeout_s=120)
    assert [code for code, _, _ in found] == [0, 0], found
    first, second = (json.loads(out) for _, out, _ in found)
    assert first["place"] == [0, 2, 0, 1] and second["place"] == [1, 2, 0, 1]
    for told in (first, second):
        assert told["mean"] == [1.5] and told["sum"] == [3] and told["sent"] == [1.0]
        assert told["gathered"] == [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]
        assert told["object"] == {"epoch": 3} and told["step"] == 1.0 and told["betas"]
        assert told["last"] == 1 and told["counts"] == [8194]  # whole numbers are not sent as floats
    assert first["gradient"] == 1.0  # the mean of both ranks' ones
    assert second["gradient"] == 0.5  # its third step is alone: the other gives zeros


def test_the_lectures_script_under_torchrun() -> None:
    """Its ranks begin with other seeds; the broadcast and the averages keep them alike."""
    found = lecture000_horovod.under_torchrun()
    assert found["ranks"] == 2 and found["apart"] == 0 and found["accuracy"] > 0.9


def test_what_is_not_known_here_is_told() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(UsageError, match="process_set=3 is not known"):
        hvd.DistributedOptimizer(optimizer, process_set=3)
    with pytest.raises(UsageError, match="Adasum"):
        hvd.DistributedOptimizer(optimizer, op=hvd.Adasum)
    with pytest.raises(UsageError, match="comm="):
        hvd.init(comm=[0, 1])
    with pytest.raises(AttributeError, match="--elastic"):
        _ = hvd.elastic
    with pytest.raises(AttributeError, match="what there is: .*allreduce"):
        _ = hvd.alltoall
