"""Hugging Face's Trainer, exact on several ranks: `from plait.hf import Trainer` in a script that was written for it.

In: processes that torchrun or `plait.launch` started, and what `transformers.Trainer` takes. Out: its loop, callbacks,
evaluation and checkpoints, with the weights that one process has of the same global batches: every batch is cut among
the ranks, no sample is repeated to make shares equal, a rank's loss weighs what it is a mean of. As there, batch sizes
are those of one process. Never FSDP, DeepSpeed or a model that transformers cut: those are plans of plait's own jobs.
"""

import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader

from plait.errors import UsageError
from plait.job.batch import map_tensors
from plait.job.order import split
from plait.run.own_loop import gathered, padded
from plait.run.wire.tell import tell
from plait.run.wrap import Wrapped, join_ranks, without_samples

try:
    import accelerate
    import transformers
    from accelerate.data_loader import prepare_data_loader
except ImportError as error:
    raise UsageError(
        f"Hugging Face's Trainer cannot be imported: {error}.", fix="pip install 'plait[hf]'."
    ) from error

if not hasattr(transformers.Trainer, "_build_accelerator_args"):
    raise UsageError(
        f"the Trainer of transformers {transformers.__version__} is older than plait's knows.",
        fix="pip install 'transformers>=5'.",
    )

__all__ = ["Trainer"]


class _Shares(BatchSampler):
    """This rank's part of every batch, which may be none; the order is that of rank 0."""

    def __init__(self, whole: BatchSampler) -> None:
        super().__init__(whole.sampler, whole.batch_size, whole.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        drawn = torch.tensor(list(self.sampler) if rank == 0 else [], dtype=torch.int64)
        order = tell(drawn)[0].tolist()
        for batch in BatchSampler(order, self.batch_size, self.drop_last):
            sizes = split(len(batch), ranks)
            yield batch[sum(sizes[:rank]) : sum(sizes[: rank + 1])]


class _Collate:
    """Samples to a batch, where there may be none."""

    def __init__(self, collate: Any, dataset: Any) -> None:
        self._collate, self._dataset = collate, dataset

    def __call__(self, samples: list[Any]) -> Any:
        if samples:
            return self._collate(samples)
        return map_tensors(lambda tensor: tensor[:0], self._collate([self._dataset[0]]))


class _Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """Accelerate's, whose models, data and gathered tensors are those of unequal shares."""

    def prepare_model(
        self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        if isinstance(model, Wrapped):
            return model
        placed = super().prepare_model(model, device_placement, evaluation_mode=True)
        return placed if evaluation_mode else Wrapped(placed)

    def prepare_data_loader(self, data_loader: Any, device_placement: Any = None, **unused: Any) -> Any:
        if isinstance(data_loader.batch_sampler, _Shares):
            return data_loader
        batches = data_loader.batch_sampler
        if type(batches) is not BatchSampler:
            raise UsageError(
                f"batches of {type(data_loader.dataset).__name__} are made by {type(batches).__name__}: they cannot be "
                "cut among ranks.",
                fix="give a dataset that has a length and indexes, and a sampler of samples.",
            )
        shares = DataLoader(
            data_loader.dataset, batch_sampler=_Shares(batches), num_workers=data_loader.num_workers,
            collate_fn=_Collate(data_loader.collate_fn, data_loader.dataset), pin_memory=data_loader.pin_memory,
            worker_init_fn=data_loader.worker_init_fn, prefetch_factor=data_loader.prefetch_factor,
            persistent_workers=data_loader.persistent_workers,
            multiprocessing_context=data_loader.multiprocessing_context,
        )  # fmt: skip
        placed = self.device_placement if device_placement is None else device_placement
        return prepare_data_loader(
            shares, self.device, num_processes=1, process_index=0, put_on_device=placed,
            use_seedable_sampler=self.use_seedable_sampler, data_seed=self.dataloader_config.data_seed,
            non_blocking=self.non_blocking,
        )  # fmt: skip

    def gather(self, tensor: Any) -> Any:
        return map_tensors(gathered, tensor)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        return map_tensors(lambda one: padded(one, dim, pad_index, pad_first), tensor)

    def unwrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        return super().unwrap_model(model.module if isinstance(model, Wrapped) else model, *args, **kwargs)


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """transformers' Trainer; alone it is that one, on several ranks it computes what that one does alone."""

    def __init__(self, model: Any = None, args: Any = None, *others: Any, **more: Any) -> None:
        args = args if args is not None else transformers.TrainingArguments(output_dir="tmp_trainer")
        self._ranks = _join(args)
        if self._ranks > 1:
            if args.fsdp or args.deepspeed or getattr(model, "is_distributed_loading_by_transformers", False):
                raise UsageError(
                    "fsdp, deepspeed and models that were cut when loaded are not for plait's Trainer.",
                    fix="leave them out, or use a plan of plait: plait.prepare(model, optimizer, plan='zero3').",
                )
            args.average_tokens_across_devices = False  # nothing is to be undone: gradients are summed
            args.accelerator_config.use_seedable_sampler = True
        super().__init__(model, args, *others, **more)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        found: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        self._accelerator_args = found
        return found

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self._ranks > 1:
            self.accelerator = _Accelerator(**self._accelerator_args)
            self.gather_function = self.accelerator.gather_for_metrics

    def _get_dataloader(
        self, dataset: Any, description: str, batch_size: int, *args: Any, **kwargs: Any
    ) -> Any:
        return super()._get_dataloader(dataset, description, batch_size * self._ranks, *args, **kwargs)

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        self._counted = super()._get_num_items_in_batch(*args, **kwargs)
        return self._counted

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        samples, own = super().get_batch_samples(*args, **kwargs)
        return samples, gathered(own).sum() if self._ranks > 1 and own is not None else own

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        if isinstance(model, Wrapped):
            model.divisor = None if num_items_in_batch is None else float(num_items_in_batch)
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        return self._whole(loss, model.fraction) if isinstance(model, Wrapped) else loss

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self._counted = None
        rows = next((value.shape[0] for value in inputs.values() if isinstance(value, Tensor)), 0)
        if rows or self._ranks == 1:
            loss, logits, labels = super().prediction_step(model, inputs, *args, **kwargs)
        else:
            step = super().prediction_step
            loss, logits, labels = without_samples(lambda given: step(model, given, *args, **kwargs), inputs)
        if self._ranks > 1 and loss is not None:
            counted = rows if self._counted is None or not rows else self._counted
            weight = torch.as_tensor(counted, dtype=torch.float64, device=loss.device)
            whole = float(gathered(weight).sum())
            loss = self._whole(loss, float(weight) / whole if whole else 0.0)
        return loss, logits, labels

    def _whole(self, loss: Tensor, fraction: float) -> Tensor:
        """The loss of all ranks' samples, of which this rank's weighs so much."""
        part = loss.detach() * fraction if fraction else torch.zeros_like(loss)
        return gathered(part).sum()


def _join(args: Any) -> int:
    """The number of ranks, of which Accelerate knows too from here on."""
    rank, ranks = join_ranks(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if args.world_size == ranks:
        return ranks
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    told = {name: os.environ.get(name, str(number)) for name, number in own.items()}
    before = dict(os.environ)
    os.environ.update(told)
    try:
        args.use_cpu = args.use_cpu or not torch.cuda.is_available()
        vars(args).pop("_setup_devices", None)  # it is read once, and was before
        args.device  # noqa: B018
    finally:
        os.environ.clear()
        os.environ.update(before)
    if args.world_size != ranks:
        raise UsageError(
            f"Accelerate sees {args.world_size} processes where there are {ranks}.",
            fix="start them by torchrun or plait.launch, without options of `accelerate launch`.",
        )
    return ranks
