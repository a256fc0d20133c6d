"""A strategy for Lightning: `Trainer(strategy=PlaitStrategy(), devices=2)`.

In: a LightningModule and a Trainer, whose loop, logging and checkpoints stay Lightning's own. Out: gradients are those
of all ranks' samples, and every DataLoader gives this rank's share of each batch: no sample is repeated, shares that
differ are weighed, batch norm has the statistics of all. As in Lightning, `batch_size` is that of one process.
Processes are started by Lightning, torchrun or `plait.launch`.
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from plait.errors import UsageError
from plait.run.share_loader import ShareLoader
from plait.run.wrap import Wrapped

__all__ = ["PlaitStrategy"]


def _lightning() -> Any:
    """Lightning by the name under which the script has it: strategies of the other package are not known to its
    Trainer."""
    known = [name for name in ("lightning.pytorch", "pytorch_lightning") if name in sys.modules]
    for name in (*known, "lightning.pytorch", "pytorch_lightning"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise UsageError("Lightning is not installed.", fix="pip install 'plait[lightning]'.")


_pl: Any = _lightning()
_fabric: Any = importlib.import_module(
    "lightning.fabric" if _pl.__name__ == "lightning.pytorch" else "lightning_fabric"
)
importlib.import_module(f"{_fabric.__name__}.plugins.environments")


class _Ranks(_fabric.plugins.environments.ClusterEnvironment):  # type: ignore[misc]
    """Processes that have met already: those of `plait.launch`."""

    creates_processes_externally = True
    main_address, main_port = "127.0.0.1", 0

    @staticmethod
    def detect() -> bool:
        return dist.is_initialized()

    def world_size(self) -> int:
        return dist.get_world_size()

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return dist.get_rank()

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return dist.get_rank()

    def node_rank(self) -> int:
        return 0


class PlaitStrategy(_pl.strategies.DDPStrategy):  # type: ignore[misc]
    """Exact data parallelism under Lightning's Trainer; options are those of its DDPStrategy."""

    def __init__(self, *, split_batches: bool = False, **options: Any) -> None:
        """`split_batches`: a DataLoader's `batch_size` counts the samples of all ranks together."""
        if dist.is_initialized():
            options.setdefault("cluster_environment", _Ranks())
        super().__init__(**options)
        self._split_batches = split_batches

    def setup_distributed(self) -> None:
        """Meet the others, where they have not met."""
        if dist.is_initialized():
            self.set_world_ranks()
        else:
            super().setup_distributed()

    def setup(self, trainer: Any) -> None:
        """As Lightning's, which then leaves the sampler of DataLoaders alone: its own would repeat samples."""
        connector = attrgetter("_accelerator_connector")(
            trainer
        )  # private to Lightning; it has no public way
        connector.use_distributed_sampler = False
        super().setup(trainer)

    def _setup_model(self, model: nn.Module) -> Wrapped:
        return Wrapped(model)

    def _register_ddp_hooks(self) -> None:
        """There are no hooks of DistributedDataParallel."""

    def process_dataloader(self, dataloader: Any) -> Any:
        """This rank's share of every batch."""
        if not isinstance(dataloader, DataLoader):
            return dataloader
        times = 1 if self._split_batches else self.world_size
        return _Shares(dataloader, device=None, times=times)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """While gradients are accumulated."""
        if isinstance(self.model, Wrapped):
            with self.model.no_sync():
                yield
        else:
            yield

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The sum or the mean over ranks, under any backend."""
        if not isinstance(tensor, Tensor) or not dist.is_initialized():
            return tensor
        name = str(reduce_op).rpartition(".")[2].lower() if reduce_op is not None else "sum"
        if name not in ("mean", "avg", "sum"):
            return super().reduce(tensor, group, reduce_op)
        dist.all_reduce(tensor, group=group)
        return (
            tensor if name == "sum" else tensor / dist.get_world_size(group)
        )  # a mean of counts is no whole number


class _Shares(ShareLoader):
    """With what Lightning looks at in a DataLoader; as its own sampler, it is told the epoch."""

    @property
    def sampler(self) -> "_Shares":
        return self
