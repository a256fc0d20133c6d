"""The `Accelerator` of a script: its processes, and its model, optimizer, data and scheduler among them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from plait.accelerate import checkpoints
from plait.accelerate.functions import DistributedType, device_of, skip_first_batches
from plait.accelerate.steppers import Optimizer, Scheduler
from plait.accelerate.trackers import Trackers
from plait.errors import UsageError
from plait.job.batch import map_tensors
from plait.job.order import split
from plait.run.own_loop import ShareLoader, gathered, padded
from plait.run.start.launch import disconnect
from plait.run.wrap import Wrapped, join_ranks


class Accelerator:
    """A script's processes, and its model, optimizer, data and scheduler among them."""

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = False,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        step_scheduler_with_optimizer: bool = True,
        project_dir: str | None = None,
        log_with: Any = None,
        **others: Any,
    ) -> None:
        unknown = [name for name, value in others.items() if value is not None]
        if unknown:
            raise UsageError(
                f"Accelerator({', '.join(unknown)}=...) is not known here.",
                fix="leave it out; plugins and other plans are for plait's own jobs.",
            )
        if mixed_precision not in (None, "no", "bf16"):
            raise UsageError(
                f"mixed_precision={mixed_precision!r} is not known here.", fix="use 'bf16' or 'no'."
            )
        self.mixed_precision = mixed_precision or "no"
        self.device = device_of(cpu)
        self.process_index, self.num_processes = join_ranks(self.device)
        self.split_batches, self.project_dir = split_batches, project_dir
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.sync_gradients = True
        """Whether the pass that is under way completes the gradients."""
        self.step = 0
        self._steps_schedulers, self._places = step_scheduler_with_optimizer, device_placement
        self._models: list[Wrapped] = []
        self._optimizers: list[Optimizer] = []
        self._schedulers: list[Scheduler] = []
        self._loaders, self._custom = list[ShareLoader](), list[Any]()
        self._trackers = Trackers(log_with)
        self.scaler, self.optimizer_step_was_skipped = None, False  # of fp16, which is refused

    @property
    def is_main_process(self) -> bool:
        """Rank 0 of all."""
        return self.process_index == 0

    @property
    def local_process_index(self) -> int:
        """This rank's number on its host."""
        return self.device.index or 0 if self.device.type == "cuda" else self.process_index

    @property
    def is_local_main_process(self) -> bool:
        """The first of its host."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """The last of all."""
        return self.process_index == self.num_processes - 1

    @property
    def use_distributed(self) -> bool:
        """Whether there are others."""
        return self.num_processes > 1

    @property
    def distributed_type(self) -> DistributedType:
        """By Accelerate's names."""
        if not self.use_distributed:
            return DistributedType.NO
        return DistributedType.MULTI_GPU if self.device.type == "cuda" else DistributedType.MULTI_CPU

    def prepare(self, *parts: Any, device_placement: Any = None) -> Any:
        """Models, optimizers, DataLoaders and schedulers, in the order in which they are given."""
        made = tuple(self._prepared(part) for part in parts)
        return made[0] if len(made) == 1 else made

    def _prepared(self, part: Any) -> Any:
        if isinstance(part, nn.Module):
            return self.prepare_model(part)
        if isinstance(part, DataLoader):
            return self.prepare_data_loader(part)
        if isinstance(part, torch.optim.Optimizer):
            self._optimizers.append(Optimizer(part, self))
            return self._optimizers[-1]
        if hasattr(part, "step") and hasattr(part, "state_dict"):
            times = 1 if self.split_batches or not self._steps_schedulers else self.num_processes
            self._schedulers.append(Scheduler(part, self, times))
            return self._schedulers[-1]
        return part

    def prepare_model(self, model: nn.Module, device_placement: bool | None = None) -> Wrapped:
        """Gradients of `model` are those of all ranks' samples."""
        if isinstance(model, Wrapped):
            return model
        placed = model.to(self.device) if self._places else model
        if self.mixed_precision == "bf16":
            placed.forward = torch.autocast(self.device.type, torch.bfloat16)(placed.forward)
        self._models.append(Wrapped(placed))
        return self._models[-1]

    def prepare_data_loader(
        self, loader: DataLoader[Any], device_placement: bool | None = None
    ) -> ShareLoader:
        """Gives this rank's share of each batch."""
        times = 1 if self.split_batches else self.num_processes
        self._loaders.append(ShareLoader(loader, device=self.device if self._places else None, times=times))
        return self._loaders[-1]

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Gradients are summed over ranks, and optimizers step, every so many times and at the end of the data."""
        at_end = any(loader.is_read and loader.at_end for loader in self._loaders)
        self.step = 0 if at_end else self.step + 1
        self.sync_gradients = at_end or self.step % self.gradient_accumulation_steps == 0
        with self.no_sync(*models) if not self.sync_gradients else nullcontext():
            yield

    @contextmanager
    def no_sync(self, *models: nn.Module) -> Iterator[None]:
        """Gradients stay this rank's."""
        chosen = [model for model in models if isinstance(model, Wrapped)] or self._models
        with ExitStack() as stack:
            for model in chosen:
                stack.enter_context(model.no_sync())
            yield

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """`loss.backward()`, of a part of what is accumulated."""
        (loss / self.gradient_accumulation_steps).backward(**kwargs)  # type: ignore[no-untyped-call]

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor | None:
        """torch's, where gradients are complete."""
        if not self.sync_gradients:
            return None
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """torch's, where gradients are complete."""
        if self.sync_gradients:
            nn.utils.clip_grad_value_(parameters, clip_value)

    def gather(self, tree: Any) -> Any:
        """Tensors of all ranks one after the other along dim 0, in which they may differ."""
        return map_tensors(gathered, tree)

    def gather_for_metrics(self, tree: Any, use_gather_object: bool = False) -> Any:
        """The same: no sample is repeated. A loss that is repeated for a batch counts for the samples of this rank."""
        read = next((loader for loader in reversed(self._loaders) if loader.is_read and loader.sizes), None)
        if read is not None:
            usual = split(read.batch_size, self.num_processes)[self.process_index]
            own = read.sizes[self.process_index]
            tree = map_tensors(lambda t: t[:own] if t.dim() and t.shape[0] == usual else t, tree)
        return self.gather(tree)

    def pad_across_processes(
        self, tree: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """Tensors as long as the longest rank's along `dim`."""
        return map_tensors(lambda tensor: padded(tensor, dim, pad_index, pad_first), tree)

    def reduce(self, tree: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum or the mean over ranks."""

        def reduced(tensor: Tensor) -> Tensor:
            whole = tensor.detach().clone()
            if self.use_distributed:
                dist.all_reduce(whole)
            return whole * scale / (self.num_processes if reduction == "mean" else 1)

        return map_tensors(reduced, tree)

    def autocast(self) -> AbstractContextManager[Any]:
        """Where computing in short floats is wanted."""
        wanted = self.mixed_precision == "bf16"
        return torch.autocast(self.device.type, torch.bfloat16) if wanted else nullcontext()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """On the main process alone."""
        if self.is_main_process:
            print(*args, **kwargs)

    def wait_for_everyone(self) -> None:
        """All ranks come here before any goes on."""
        if self.use_distributed:
            dist.all_reduce(torch.zeros(1, device=self.device))

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """The main process before all others."""
        if not self.is_main_process:
            self.wait_for_everyone()
        try:
            yield
        finally:
            if self.is_main_process:
                self.wait_for_everyone()

    local_main_process_first = main_process_first

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that does nothing elsewhere."""
        return lambda *args, **kwargs: function(*args, **kwargs) if self.is_main_process else None

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True) -> nn.Module:
        """The user's own."""
        return model.module if isinstance(model, Wrapped) else model

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """With the user's own names."""
        return self.unwrap_model(model).state_dict()

    def register_for_checkpointing(self, *objects: Any) -> None:
        """More that has a `state_dict`, to be saved."""
        self._custom += objects

    def skip_first_batches(self, loader: Any, num_batches: int = 0) -> Any:
        """The loader's next pass without its first batches."""
        return skip_first_batches(loader, num_batches)

    def _kept(self) -> dict[str, list[Any]]:
        return {
            "models": [model.module for model in self._models],
            "optimizers": [one.optimizer for one in self._optimizers],
            "schedulers": [one.scheduler for one in self._schedulers],
            "objects": self._custom,
        }

    def save_state(self, output_dir: str | Path, **unused: Any) -> str:
        """Everything that was prepared, and the generators of every rank."""
        checkpoints.save(Path(output_dir), self._kept(), self._loaders, self.process_index)
        self.wait_for_everyone()
        return str(output_dir)

    def load_state(self, input_dir: str | Path, **unused: Any) -> None:
        """What `save_state` wrote, on any number of ranks."""
        checkpoints.load(Path(input_dir), self._kept(), self._loaders, self.process_index)

    def save(self, value: Any, path: str | Path, **unused: Any) -> None:
        """torch.save on the main process."""
        if self.is_main_process:
            torch.save(value, path)

    def free_memory(self, *objects: Any) -> tuple[None, ...]:
        """Forget what was prepared."""
        for kept in (self._models, self._optimizers, self._schedulers, self._loaders, self._custom):
            kept.clear()
        self.step = 0
        return (None,) * len(objects)

    def init_trackers(self, project_name: str, config: Any = None, init_kwargs: Any = None) -> None:
        """Start the loggers that `log_with` names, on the main process; they write into `project_dir`."""
        if self.is_main_process:
            self._trackers.begin(project_name, self.project_dir, config)

    def log(self, values: Any, step: int | None = None, log_kwargs: Any = None) -> None:
        """Numbers, by name, to all loggers."""
        if self.is_main_process:
            self._trackers.write(values, step)

    def end_training(self) -> None:
        """Close the loggers, and leave the others."""
        self._trackers.end()
        self.wait_for_everyone()
        disconnect()

    @property
    def state(self) -> "Accelerator":
        """What tells of the processes: this."""
        return self

    def __repr__(self) -> str:
        place = f"rank {self.process_index} of {self.num_processes} on {self.device}"
        return f"{place} ({self.distributed_type}, mixed precision {self.mixed_precision})"
