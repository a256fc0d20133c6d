"""The `Accelerator` of a script: its processes, and its model, optimizer, data and scheduler among them."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_model
from torch import Tensor, nn
from torch.utils.data import DataLoader

from plait.accelerate import checkpoints
from plait.accelerate.functions import gather_object, is_of_tensors, skip_first_batches
from plait.accelerate.processes import PartialState
from plait.accelerate.settings import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
)
from plait.accelerate.steppers import Optimizer, Scheduler
from plait.accelerate.trackers import Trackers
from plait.errors import UsageError
from plait.job.batch import map_tensors
from plait.job.order import split
from plait.run.share_loader import ShareLoader
from plait.run.start.launch import disconnect
from plait.run.wrap import Wrapped


class Accelerator(PartialState):
    """A script's processes, and its model, optimizer, data and scheduler among them."""

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = False,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        step_scheduler_with_optimizer: bool = True,
        project_dir: str | Path | None = None,
        log_with: Any = None,
        dataloader_config: DataLoaderConfiguration | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        kwargs_handlers: Sequence[Any] | None = None,
        **others: Any,
    ) -> None:
        unknown = [f"{name}=..." for name, value in others.items() if value is not None]
        unknown += [
            f"kwargs_handlers=[{type(one).__name__}(...)]"
            for one in kwargs_handlers or ()
            if not isinstance(one, DistributedDataParallelKwargs | InitProcessGroupKwargs | ProfileKwargs)
        ]
        profiles = [one for one in kwargs_handlers or () if isinstance(one, ProfileKwargs)]
        self._profile = profiles[-1] if profiles else ProfileKwargs()
        if unknown:
            raise UsageError(
                f"Accelerator({', '.join(unknown)}) is not known here.",
                fix="leave it out; plugins and other plans are for plait's own jobs.",
            )
        if mixed_precision not in (None, "no", "bf16"):
            raise UsageError(
                f"mixed_precision={mixed_precision!r} is not known here.", fix="use 'bf16' or 'no'."
            )
        super().__init__(cpu=cpu)
        self.mixed_precision = mixed_precision or "no"
        self.project_configuration = project_config or ProjectConfiguration(project_dir=project_dir)
        self.split_batches = split_batches or (
            dataloader_config is not None and dataloader_config.split_batches
        )
        plugin = gradient_accumulation_plugin or GradientAccumulationPlugin()
        self.gradient_accumulation_steps = plugin.num_steps or gradient_accumulation_steps
        self._ends_with_data = plugin.sync_with_dataloader
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
    def project_dir(self) -> str | Path | None:
        """Of checkpoints that are numbered."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | Path | None:
        """Of loggers."""
        return self.project_configuration.logging_dir or self.project_dir

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
            return self.prepare_optimizer(part)
        if hasattr(part, "step") and hasattr(part, "state_dict"):
            return self.prepare_scheduler(part)
        return part

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> Optimizer:
        """Steps where gradients are complete."""
        self._optimizers.append(Optimizer(optimizer, self))
        return self._optimizers[-1]

    def prepare_scheduler(self, scheduler: Any) -> Scheduler:
        """Steps with the optimizer."""
        times = 1 if self.split_batches or not self._steps_schedulers else self.num_processes
        self._schedulers.append(Scheduler(scheduler, self, times))
        return self._schedulers[-1]

    def prepare_model(self, model: nn.Module, device_placement: bool | None = None) -> Wrapped:
        """Gradients of `model` are those of all ranks' samples."""
        if isinstance(model, Wrapped):
            return model
        placed = model.to(self.device) if self._places else model
        if self.mixed_precision == "bf16":
            placed.forward = torch.autocast(self.device.type, torch.bfloat16)(placed.forward)
        self._models.append(Wrapped(placed, averages_sums=True))
        return self._models[-1]

    def prepare_data_loader(
        self, loader: DataLoader[Any], device_placement: bool | None = None
    ) -> ShareLoader:
        """Gives this rank's share of each batch; read one ahead, as there."""
        times, device = 1 if self.split_batches else self.num_processes, self.device if self._places else None
        self._loaders.append(ShareLoader(loader, device=device, times=times, one_ahead=True))
        return self._loaders[-1]

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Gradients are summed over ranks, and optimizers step, every so many times and at the end of the data."""
        at_end = self._ends_with_data and any(loader.is_read and loader.at_end for loader in self._loaders)
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

    def gather_for_metrics(self, tree: Any, use_gather_object: bool = False) -> Any:
        """The same: no sample is repeated. A loss that is repeated for a batch counts for the samples of this rank.

        Lists of other things than tensors are put one after the other.
        """
        if use_gather_object or not is_of_tensors(tree):
            return gather_object(tree)
        read = next((loader for loader in reversed(self._loaders) if loader.is_read and loader.sizes), None)
        if read is not None:
            usual = split(read.batch_size, self.num_processes)[self.process_index]
            own = read.sizes[self.process_index]
            tree = map_tensors(lambda t: t[:own] if t.dim() and t.shape[0] == usual else t, tree)
        return self.gather(tree)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Nothing is to be done: gradients are not scaled."""

    def autocast(self) -> AbstractContextManager[Any]:
        """Where computing in short floats is wanted."""
        wanted = self.mixed_precision == "bf16"
        return torch.autocast(self.device.type, torch.bfloat16) if wanted else nullcontext()

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

    def save_state(self, output_dir: str | Path | None = None, **unused: Any) -> str:
        """Everything that was prepared, and the generators of every rank; older ones go as the project says."""
        folder = (
            Path(output_dir)
            if output_dir is not None
            else checkpoints.next_folder(self.project_configuration)
        )
        self.wait_for_everyone()
        if output_dir is None and self.is_main_process:
            checkpoints.make_room(self.project_configuration)
        checkpoints.save(folder, self._kept(), self._loaders, self.process_index)
        self.wait_for_everyone()
        return str(folder)

    def load_state(self, input_dir: str | Path | None = None, **unused: Any) -> None:
        """What `save_state` wrote, on any number of ranks; without a name, the project's newest."""
        folder = Path(input_dir) if input_dir is not None else checkpoints.newest(self.project_dir)
        checkpoints.load(folder, self._kept(), self._loaders, self.process_index)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | Path,
        max_shard_size: Any = None,
        safe_serialization: bool = True,
    ) -> None:
        """The weights with the user's own names, as one file: model.safetensors, or pytorch_model.bin."""
        if not self.is_main_process:
            return
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        if safe_serialization:
            save_model(self.unwrap_model(model), str(folder / "model.safetensors"))
        else:
            torch.save(self.get_state_dict(model), folder / "pytorch_model.bin")

    def save(self, value: Any, path: str | Path, **unused: Any) -> None:
        """torch.save on the main process."""
        if self.is_main_process:
            torch.save(value, path)

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[torch.profiler.profile]:
        """torch's profiler; each process writes its trace where the handler says."""
        with (profile_handler or self._profile).recorded(self.process_index) as profiler:
            yield profiler
        self.wait_for_everyone()

    def free_memory(self, *objects: Any) -> tuple[None, ...]:
        """Forget what was prepared."""
        for kept in (self._models, self._optimizers, self._schedulers, self._loaders, self._custom):
            kept.clear()
        self.step = 0
        return (None,) * len(objects)

    clear = free_memory

    @contextmanager
    def join_uneven_inputs(self, joinables: Any = None, even_batches: bool | None = None) -> Iterator[None]:
        """Nothing is to be done: a rank whose share is empty still takes part."""
        yield

    def init_trackers(self, project_name: str, config: Any = None, init_kwargs: Any = None) -> None:
        """Start the loggers that `log_with` names, on the main process; they write into `project_dir`."""
        if self.is_main_process:
            self._trackers.begin(project_name, self.logging_dir, config)

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
