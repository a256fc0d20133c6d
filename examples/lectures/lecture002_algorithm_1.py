"""Algorithm 1 of lecture 002, data-parallel training, line by line, with a convergence criterion on the weights.

python -m examples.lectures.lecture002_algorithm_1
"""

import math

import torch
from examples.lectures.exhibit import Exhibit, Number, show
from examples.linear_regression import least_squares, patients
from torch import Tensor, nn

import plait

PROCESSES, ENOUGH, AT_MOST = 2, 1e-9, 20_000


def converged(before: Tensor | None, now: Tensor) -> bool:
    """Whether no weight moved in a step by more than `ENOUGH`."""
    return before is not None and (now - before).abs().max().item() < ENOUGH


def algorithm(processes: int) -> list[float]:
    """What process p runs; the numbers of the lines are the lecture's."""
    p = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    x, y = (tensor.double() for tensor in patients().tensors)
    torch.manual_seed(0)  # 2: weights by the same seed
    model = plait.wrap(nn.Linear(10, 1).double())  # 1; its backward is 10 and 11: gradients of all N samples
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    start, stop = p * len(x) // processes, (p + 1) * len(x) // processes  # 3, 4
    chunk = x[start:stop], y[start:stop]  # 5; 6, the order within a chunk, does not matter to a full gradient
    before, steps = None, 0
    while steps < AT_MOST:  # 7
        now = torch.cat([w.detach().flatten() for w in model.parameters()])
        if converged(before, now):
            break
        before = now
        optimizer.zero_grad()
        nn.functional.mse_loss(model(chunk[0]), chunk[1]).backward()  # 8 to 11
        optimizer.step()  # 12
        steps += 1
    return [float(steps), *now.tolist()]


def exhibit() -> Exhibit:
    one, two = plait.launch(algorithm, 1, 1)[0], plait.launch(algorithm, PROCESSES, PROCESSES)
    analytic = least_squares().tolist()
    gap = max(abs(a - b) for a, b in zip(two[0][1:], analytic, strict=True))
    apart = max(abs(a - b) for a, b in zip(two[0][1:], one[1:], strict=True))
    ranks_apart = max(abs(a - b) for a, b in zip(two[0], two[1], strict=True))
    assert math.isfinite(gap)
    return Exhibit(
        lecture="002",
        title="Algorithm 1: data-parallel training until the weights stand still",
        idea="Every process has the model and a chunk of the data; gradients are summed over processes "
        "(MPI.Allreduce), so all take the same step, until the weights have converged. The loop is "
        "written here as the lecture prints it; `plait.wrap(model)` makes its backward that of all "
        "samples.",
        numbers=[
            Number(what="steps until no weight moves by 1e-9, 1 process", ours=one[0]),
            Number(what="steps, 2 processes of 221 patients each", ours=two[0][0]),
            Number(what="largest difference of weights, 2 processes to 1", ours=f"{apart:.1e}"),
            Number(what="largest difference of weights between the two processes", ours=f"{ranks_apart:.1e}"),
            Number(what="largest difference to the analytic solution", ours=f"{gap:.1e}"),
        ],
        seen="Both end at the least-squares solution, after as many steps. As printed, line 11 adds "
        "gradients up without dividing by the number of samples and line 9 compares the chunk's "
        "predictions with all of Y; here the chunk has its own Y, and the gradient is the mean.",
    )


if __name__ == "__main__":
    show(exhibit())
