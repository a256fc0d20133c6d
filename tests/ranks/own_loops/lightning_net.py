"""A module of Lightning's and its Trainer, for `test_lightning.py`: apart, for Lightning takes seconds to import."""

import warnings
from typing import Any

import pytorch_lightning as pl
import torch
from tests.ranks.own_loops.test_own_loop import data, net
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from plait.lightning import PlaitStrategy


class Net(pl.LightningModule):
    """Batch norm, labels that do not count, an epoch whose last batch is short."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net(True)

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def validation_step(self, batch: Any, index: int) -> None:
        x, _ = batch
        self.log("size", self.net(x).pow(2).mean(), sync_dist=True, on_epoch=True, batch_size=len(x))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        }


def fitted(strategy: Any, devices: int, batch: int, folder: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=devices, max_epochs=2, accumulate_grad_batches=2,
        gradient_clip_val=0.5, logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder,
    )  # fmt: skip
    module = Net()
    trainer.fit(module, DataLoader(data(), batch_size=batch), DataLoader(data(), batch_size=batch))
    saved = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=False)
    return {
        "weights": [value.tolist() for value in module.net.state_dict().values()],
        "saved": [value.tolist() for value in saved["state_dict"].values()],
        "size": float(trainer.callback_metrics["size"]),
    }


def on_two(folder: str) -> dict[str, Any]:
    return fitted(PlaitStrategy(), 2, 3, folder)
