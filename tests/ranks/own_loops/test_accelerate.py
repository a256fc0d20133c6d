"""A script that was written for Accelerate, with its import changed: the weights of plain PyTorch on all samples."""

import copy
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import plait
from plait.accelerate import (
    Accelerator,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    DistributedType,
    ProfileKwargs,
    skip_first_batches,
    utils,
)
from plait.accelerate.local_sgd import LocalSGD
from plait.accelerate.logging import get_logger
from plait.accelerate.utils import (
    DDPCommunicationHookType,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    find_executable_batch_size,
)
from plait.errors import DiskError, UsageError

pytestmark = pytest.mark.timeout(120)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(21, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (21,), generator=generator)
    y[[0, 3, 4]] = -100
    return TensorDataset(x, y)


def parts(batch: int) -> tuple[Any, ...]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20)
    return (
        model,
        optimizer,
        DataLoader(data(), batch_size=batch),
        DataLoader(data(), batch_size=batch),
        scheduler,
    )


def script(folder: str) -> dict[str, Any]:
    """The loop of accelerate's examples/by_feature/gradient_accumulation.py and checkpointing.py."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, log_with="csv", project_dir=folder)
    accelerator.init_trackers("tracked", {"lr": 0.05})
    model, optimizer, train, evaluate, scheduler = accelerator.prepare(*parts(2))
    norms = []
    for epoch in range(2):
        model.train()
        for x, y in train:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                norms += [] if norm is None else [float(norm)]
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        if epoch == 0:
            accelerator.save_state(folder)
    model.eval()
    seen, losses = [], []
    for x, y in evaluate:
        with torch.no_grad():
            losses += accelerator.gather_for_metrics(model(x).pow(2).mean().repeat(2)).tolist()
            found, labels = accelerator.gather_for_metrics((model(x).argmax(-1), y))
        seen += (found == labels).tolist()
    weights = {name: value.tolist() for name, value in accelerator.unwrap_model(model).state_dict().items()}
    long = torch.arange(2.0 + accelerator.process_index).view(1, -1)
    whole = accelerator.gather(accelerator.pad_across_processes(long, dim=1, pad_index=-1)).tolist()
    accelerator.log({"loss": torch.tensor(0.5), "seen": {"all": len(seen)}}, step=3)
    told: list[str] = []
    handler = logging.StreamHandler(SimpleNamespace(write=told.append, flush=lambda: None))
    logging.getLogger("plaits").addHandler(handler)
    get_logger("plaits", "info").info("once")
    get_logger("plaits").info("all", main_process_only=False)
    again = Accelerator(cpu=True)
    _, _, train, _, _ = again.prepare(*parts(2))
    again.load_state(folder)
    rest = [len(x) for x, _ in skip_first_batches(train, 4)]
    kind = accelerator.distributed_type == DistributedType.MULTI_CPU
    rank = accelerator.process_index
    summed = nn.Linear(2, 1)
    ready = Accelerator(cpu=True).prepare(summed)
    rows = torch.full((2 - rank, 2), 1.0 + rank)
    (ready(rows).sum() / 3 * accelerator.num_processes).backward()  # as scripts undo an average over ranks
    triggers = [accelerator.check_trigger()]
    if rank == 1:
        accelerator.set_trigger()
    triggers += [accelerator.check_trigger(), accelerator.check_trigger()]
    with accelerator.split_between_processes({"x": [1, 2, 3]}, apply_padding=True) as own:
        words = accelerator.gather_for_metrics([f"{rank}: {own['x']}"])
    only = accelerator.on_process(process_index=1)(lambda: "here")()
    accelerator.save_model(model, folder)
    return {
        "weights": weights, "norms": norms, "seen": seen, "lr": scheduler.get_last_lr(), "rest": rest, "kind": kind,
        "sum": float(accelerator.reduce(torch.tensor(1.0 + accelerator.process_index))), "epoch": train.epoch,
        "size": sum(losses) / len(losses), "padded": whole, "told": "".join(told),
        "triggers": triggers, "words": words, "only": only,
        "summed": next(one.grad.tolist() for one in summed.parameters() if one.grad is not None),
    }  # fmt: skip


def plain() -> dict[str, Any]:
    """The same in one process: batches of four, since two ranks have two samples each."""
    model, optimizer, train, evaluate, scheduler = parts(4)
    norms = []
    for _ in range(2):
        model.train()
        for number, (x, y) in enumerate(train):
            (F.cross_entropy(model(x), y) / 2).backward()
            if number % 2 == 1 or number == len(train) - 1:
                norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                scheduler.step()
                scheduler.step()  # once for each rank, as Accelerate does
                optimizer.zero_grad()
    model.eval()
    seen = [hit for x, y in evaluate for hit in (model(x).argmax(-1) == y).tolist()]
    with torch.no_grad():
        size = float(model(data().tensors[0]).pow(2).mean())
    return {"size": size, "model": model, "norms": norms, "seen": seen, "lr": scheduler.get_last_lr()}


def test_a_script_of_accelerates(tmp_path: Path) -> None:
    expected = plain()
    for rank, found in enumerate(plait.launch(script, 2, str(tmp_path / "state"))):
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-9)
        assert found["lr"] == pytest.approx(expected["lr"])
        assert found["seen"] == expected["seen"] and len(found["seen"]) == 21
        assert found["sum"] == 3.0 and found["kind"]
        assert found["size"] == pytest.approx(expected["size"], rel=1e-9)  # each sample counts once
        assert found["padded"] == [[0.0, 1.0, -1.0], [0.0, 1.0, 2.0]]
        assert found["triggers"] == [False, True, False] and found["only"] == (None, "here")[rank]
        assert found["summed"] == [[pytest.approx((2 * 1.0 + 2.0) / 3)] * 2]
        assert found["words"] == ["0: [1, 2]", "1: [3, 3]"]
        assert found["told"] == ("once\nall\n" if rank == 0 else "all\n")
        assert found["rest"] == ([2, 1] if rank == 0 else [2, 0]) and found["epoch"] == 2
        for name, value in expected["model"].state_dict().items():
            assert torch.allclose(
                torch.tensor(found["weights"][name], dtype=value.dtype), value, rtol=1e-9, atol=1e-12
            )

    saved = load_file(tmp_path / "state" / "model.safetensors")
    assert saved["0.weight"].tolist() == found["weights"]["0.weight"]
    rows = (tmp_path / "state" / "tracked" / "metrics.csv").read_text().splitlines()
    assert rows == ["step,name,value", "3,loss,0.5", "3,seen/all,21.0"]


def interrupted(folder: str, stop: int | None) -> list[float]:
    """Two epochs of shuffled batches with dropout; saved in the second, where it `stop`s and a new script goes on."""
    torch.manual_seed(5)
    seen: list[float] = []

    def begin() -> tuple[Any, ...]:
        accelerator = Accelerator(cpu=True)
        model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.2)).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        loader = DataLoader(data(), batch_size=4, shuffle=True)
        return accelerator, *accelerator.prepare(model, optimizer, loader)

    accelerator, model, optimizer, loader = begin()
    done = 0
    while done < 12:
        for x, y in loader if done % 6 == 0 else skip_first_batches(loader, done % 6):
            loss = F.cross_entropy(model(x), y.clamp(min=0))
            seen.append(float(loss.detach()))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if done == stop:
                accelerator.save_state(folder)
                torch.manual_seed(77)
                accelerator, model, optimizer, loader = begin()
                accelerator.load_state(folder)
                break
    return seen


@pytest.mark.parametrize("stop", [3, 6, 8])
def test_a_pass_goes_on_in_its_own_order(tmp_path: Path, stop: int) -> None:
    assert interrupted(str(tmp_path), stop) == interrupted(str(tmp_path), None)


def local(folder: str) -> dict[str, Any]:
    """Three steps of each rank's own, averaged after two and at the end; then one of both together."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(5)
    model, optimizer = nn.Linear(4, 3).double(), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    x, y = data().tensors
    own, found = slice(5 * accelerator.process_index, 5 * accelerator.process_index + 5), []
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2) as averaged:
        for number in range(4):
            if number == 3:
                averaged.__exit__(None, None, None)
            accelerator.backward(F.cross_entropy(model(x[own]), y[own].clamp(min=0)))
            optimizer.step()
            optimizer.zero_grad()
            averaged.step()
            found.append(model.module.weight.tolist())
    return {"weights": found}


def locally() -> list[list[torch.Tensor]]:
    """The same in one process."""
    x, y = data().tensors
    torch.manual_seed(5)
    first = nn.Linear(4, 3).double()
    models = [first, copy.deepcopy(first)]
    found: list[list[torch.Tensor]] = []
    for number in range(4):
        if number == 3:
            _mean(models, lambda parameter: parameter)
        for rank, model in enumerate(models):
            own = slice(5 * rank, 5 * rank + 5)
            model.zero_grad()
            F.cross_entropy(model(x[own]), y[own].clamp(min=0)).backward()
        if number == 3:
            _mean(models, lambda parameter: parameter.grad)
        for model in models:
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        if number in (1, 3):
            _mean(models, lambda parameter: parameter)
        found.append([model.weight.detach().clone() for model in models])
    return found


def _mean(models: list[nn.Linear], of: Any) -> None:
    with torch.no_grad():
        for pair in zip(*(model.parameters() for model in models), strict=True):
            mean = sum(of(one) for one in pair) / len(pair)
            for one in pair:
                of(one).copy_(mean)


def test_ranks_that_train_for_themselves(tmp_path: Path) -> None:
    expected = locally()
    for rank, found in enumerate(plait.launch(local, 2, str(tmp_path))):
        for weights, both in zip(found["weights"], expected, strict=True):
            assert torch.allclose(torch.tensor(weights, dtype=torch.float64), both[rank], rtol=1e-9)


def test_a_batch_that_fits_is_found() -> None:
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=20)
    def train(batch_size: int, fits: int, error: type[Exception] = RuntimeError) -> int:
        tried.append(batch_size)
        if batch_size > fits:
            raise error("CUDA out of memory.")
        return batch_size

    assert train(16) == 16 and tried == [20, 18, 16]
    assert train(16) == 16 and tried == [20, 18, 16, 16]
    with pytest.raises(ValueError, match="out of memory"):
        train(3, ValueError)
    with pytest.raises(RuntimeError, match="reached zero"):
        train(0)


def test_what_is_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="SimpleNamespace"):
        Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(), SimpleNamespace()])
    with pytest.raises(UsageError, match="comm_hook"):
        DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    with pytest.raises(UsageError, match="that was prepared"):
        LocalSGD(Accelerator(cpu=True), nn.Linear(2, 2), 4)
    with pytest.raises(UsageError, match="fsdp_plugin"):
        Accelerator(fsdp_plugin=1)
    with pytest.raises(UsageError, match="dispatch_batches"):
        DataLoaderConfiguration(dispatch_batches=True)
    with pytest.raises(UsageError, match="where to"):
        Accelerator(cpu=True).save_state()
    with pytest.raises(UsageError, match="comet_ml is not known"):
        Accelerator(log_with="comet_ml")
    with pytest.raises(UsageError, match="fp16"):
        Accelerator(mixed_precision="fp16")
    with pytest.raises(UsageError, match="holds no state"):
        Accelerator(cpu=True).load_state(tmp_path)


def test_what_was_saved_stays_where_there_is_no_room_for_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator, model = Accelerator(cpu=True), nn.Linear(1, 1)
    accelerator.prepare(model)
    nn.init.constant_(model.weight, 1)
    accelerator.save_state(tmp_path)

    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    nn.init.constant_(model.weight, 2)
    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full)
        with pytest.raises(DiskError, match=r"state\.pt cannot be written: No space"):
            accelerator.save_state(tmp_path)
    accelerator.load_state(tmp_path)
    assert model.weight.item() == 1
    for content in (b"", b"no file of torch's", (tmp_path / "random-0.pt").read_bytes()):
        (tmp_path / "state.pt").write_bytes(content)
        with pytest.raises(UsageError, match=r"state\.pt (cannot be read|has no models)"):
            accelerator.load_state(tmp_path)


def test_checkpoints_of_a_project(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def started() -> tuple[Accelerator, nn.Linear]:
        project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
        plugin = GradientAccumulationPlugin(num_steps=3, sync_with_dataloader=False)
        accelerator = Accelerator(cpu=True, project_config=project, gradient_accumulation_plugin=plugin)
        assert accelerator.gradient_accumulation_steps == 3 and accelerator.logging_dir == str(tmp_path)
        model = nn.Linear(1, 1)
        accelerator.prepare(model)
        return accelerator, model

    accelerator, model = started()
    for number in range(3):
        nn.init.constant_(model.weight, number)
        accelerator.save_state()
    assert "checkpoint_0 is deleted: total_limit=2" in capsys.readouterr().out
    accelerator, model = started()
    accelerator.load_state()
    assert model.weight.item() == 2
    assert accelerator.save_state().endswith("checkpoint_3")  # nothing of the run before is written over
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "checkpoint_2",
        "checkpoint_3",
    ]


def test_a_scheduler_of_a_prepared_optimizer() -> None:
    accelerator, model = Accelerator(cpu=True), nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(2):
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == optimizer.optimizer.param_groups[0]["lr"] == 0.25
    other = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1.0))
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["lr"] == 0.25 and isinstance(other, torch.optim.Optimizer)


def test_questions_of_scripts(tmp_path: Path) -> None:
    assert utils.is_torch_available() and utils.is_xpu_available() == torch.xpu.is_available()
    assert not utils.is_surely_not_installed_available()
    with pytest.raises(AttributeError, match="has no FP8RecipeKwargs"):
        _ = utils.FP8RecipeKwargs
    accelerator = Accelerator(
        cpu=True, kwargs_handlers=[ProfileKwargs(activities=["cpu"], output_trace_dir=str(tmp_path))]
    )
    loader = accelerator.prepare(DataLoader(data(), batch_size=10))
    with accelerator.profile() as profiler:
        ends = [loader.end_of_dataloader for _ in loader]
    assert ends == [False] * (len(loader) - 1) + [True] and loader.total_batch_size == 10
    assert (tmp_path / "profile_0.json").stat().st_size and profiler.key_averages()
