"""Linear regression on 442 diabetes patients: gradient descent until converged, beside the analytic solution.

    plait run examples/linear_regression.py --plan ddp --ranks 2
    python examples/linear_regression.py

The loss is convex, so training must end at the least-squares solution of the normal equations. It does, to the
precision of float32.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import plait

DATA = Path(__file__).parent / "data" / "diabetes.npz"


def patients() -> TensorDataset:
    """Ten measurements of each patient and the progression of the disease a year later, all standardised."""
    with np.load(DATA) as file:
        columns = [torch.from_numpy(file[name]).double() for name in ("features", "target")]
    features, target = ((column - column.mean(0)) / column.std(0) for column in columns)
    return TensorDataset(features.float(), target.float()[:, None])


def least_squares() -> Tensor:
    """The analytic solution: ten weights and the bias, in float64."""
    features, target = (tensor.double() for tensor in patients().tensors)
    features = torch.cat([features, torch.ones(len(features), 1)], dim=1)
    return torch.linalg.lstsq(features, target).solution.flatten()


def job() -> plait.Job:
    return plait.Job(
        model=lambda: nn.Linear(10, 1),
        data=patients,
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        batch=442,  # every patient in every step: the gradient is exact, and so is the point where it vanishes
        epochs=2000,
        evaluate=patients,
        evaluate_every=100,
        until=plait.Until(metric="loss", patience=3),
    )


if __name__ == "__main__":
    result = plait.train(job(), plan="ddp", ranks=2)
    trained = torch.cat([result.weights["weight"].flatten(), result.weights["bias"]]).double()
    analytic = least_squares()
    print(f"converged after {len(result.losses)} steps")
    for name, tensor in (("trained", trained), ("analytic", analytic)):
        print(f"{name:>10}: " + " ".join(f"{value:8.5f}" for value in tensor.tolist()))
    print(f"largest difference: {(trained - analytic).abs().max().item():.1e}")
