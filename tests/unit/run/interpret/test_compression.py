"""Compressed gradients: written-out references, what stays behind, bytes, faults, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.unit.program.compiled import with_instructions
from tests.unit.run.training import uncapturable_job
from tests.zoo import ZOO
from torch import Tensor, nn

from plait.errors import PlanError, ProgramError, UsageError
from plait.job.data.open import open_data
from plait.job.job import Job
from plait.plan.decisions import Sync
from plait.plan.named import resolve
from plait.program.check.soundness import check_program
from plait.program.instructions import Accumulate, Collective, Decompress
from plait.program.program import Bucket, Program
from plait.program.simulate.simulator import simulate
from plait.program.value import WEIGHT
from plait.program.write.compression import check_compressed, messages
from plait.run.interpret.compression import GUESS_SEED, Compressor
from plait.run.link.links import NoLinks
from plait.run.prepare.programs import Programs
from plait.run.proof.serial_run import run_serially
from plait.run.verify import verify
from plait.units import format_bytes

RATE, SHAPES = 0.1, ((12, 9), (12,), (5, 4, 3), (2, 2))


def small_job() -> Job:
    generator = torch.Generator().manual_seed(3)
    inputs, targets = torch.randn(8, 6, generator=generator), torch.randn(8, 5, generator=generator)
    return Job(
        model=lambda: nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5)),
        data=list(zip(inputs, targets, strict=True)),
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=RATE),
        batch=8,
        steps=4,
        shuffle=False,
    )


def compressed(method: str, **settings: Any) -> Any:
    return resolve("ddp", 2, {"sync": {"compress": method, **settings}})


def powersgd_written_out(job: Job, steps: int, rank: int) -> dict[str, Tensor]:
    """Algorithm 1 and 2 of Vogels et al. on two ranks with 4 samples each, in plain torch."""
    model = job.build_model().double()
    data = [(x.double(), y.double()) for x, y in job.data]
    generator = torch.Generator().manual_seed(GUESS_SEED)
    weights = [(n, p) for n, p in reversed(list(model.named_parameters())) if p.dim() == 2]
    guesses = {n: torch.randn(p.shape[1], rank, generator=generator, dtype=torch.float64) for n, p in weights}
    errors: dict[str, list[Tensor]] = {n: [torch.zeros_like(p) for _ in range(2)] for n, p in weights}
    for _ in range(steps):
        found = []
        for share in (data[:4], data[4:]):
            inputs, targets = (torch.stack(column) for column in zip(*share, strict=True))
            loss = (model(inputs) - targets).square().sum() / (8 * 5)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            found.append(dict(zip(dict(model.named_parameters()), gradients, strict=True)))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                own = [each[name] for each in found]
                if name in guesses:
                    wanted = [g + e for g, e in zip(own, errors[name], strict=True)]
                    left = torch.linalg.qr(wanted[0] @ guesses[name] + wanted[1] @ guesses[name])[0]
                    rights = [matrix.t() @ left for matrix in wanted]
                    errors[name] = [m - left @ r.t() for m, r in zip(wanted, rights, strict=True)]
                    guesses[name] = rights[0] + rights[1]
                    parameter.sub_(RATE * (left @ guesses[name].t()))
                else:
                    parameter.sub_(RATE * (own[0] + own[1]))
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_powersgd_is_the_algorithm_written_out() -> None:
    job = small_job()
    record = run_serially(job, compressed("powersgd", compress_rank=2), 4, torch.float64)
    wanted = powersgd_written_out(job, 4, rank=2)
    for name, tensor in wanted.items():
        torch.testing.assert_close(record.weights[name], tensor, rtol=0, atol=1e-12)
    exact = run_serially(job, resolve("ddp", 2), 4, torch.float64)
    assert any((record.weights[n] - exact.weights[n]).abs().max() > 1e-6 for n in wanted), "nothing was lost"


@pytest.mark.parametrize(("overlap", "bucket_mib"), [(True, 0.0), (False, 8.0)])
def test_lossless_settings_equal_one_rank(overlap: bool, bucket_mib: float) -> None:
    job = ZOO["mlp"].job(batch=7, steps=2, optimizer="adamw")
    one = run_serially(job, resolve("single", 1), 2, torch.float64)
    for method in ("topk", "powersgd"):
        plan = compressed(method, compress_keep=1.0, compress_rank=32, overlap=overlap, bucket_mib=bucket_mib)
        record = run_serially(job, plan, 2, torch.float64)
        assert record.spread == 0.0
        for name, tensor in one.weights.items():
            torch.testing.assert_close(record.weights[name], tensor, rtol=1e-9, atol=1e-11)


def _even(count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(1))


HARD = {
    "even": _even,
    "all large ones at one place": lambda count: torch.arange(count).flip(0).float() ** 4,
    "large where no sample is taken": lambda count: (
        (torch.arange(count) % 3 == 1).float() * 9 + _even(count) / 9
    ),
    "mostly zero": lambda count: torch.where(torch.arange(count) % 999 == 5, _even(count), 0.0),
    "no numbers among them": lambda count: torch.where(
        torch.arange(count) % 2000 == 7, torch.nan, _even(count)
    ),
    "none of them a number": lambda count: torch.full((count,), torch.nan),
}


@pytest.mark.parametrize("case", HARD)
@pytest.mark.parametrize("keep", [0.0001, 0.01, 0.6])
def test_the_largest_of_many_are_those_of_torch(case: str, keep: float) -> None:
    bucket = Bucket(parameters=("a",), shapes=((40_001,),), dtype=torch.float32, axis="data")
    sync = Sync(compress="topk", compress_keep=keep)
    flat = HARD[case](bucket.num_elements)
    kept = round(keep * bucket.num_elements)
    message = Compressor(NoLinks()).compress(bucket, flat.clone(), sync, 0, None)
    sent = message[: kept * 4].view(torch.float32)
    wanted = torch.topk(flat.abs(), kept).values
    assert torch.equal(
        sent.abs().sort(descending=True).values.nan_to_num(nan=-1.0), wanted.nan_to_num(nan=-1.0)
    )
    places = message[kept * 4 :].view(torch.int32).long()
    assert len(places.unique()) == kept and torch.equal(flat[places].nan_to_num(), sent.nan_to_num())


@pytest.mark.parametrize(("method", "digits"), [("fp16", 2.0**-10), ("bf16", 2.0**-7)])
def test_casts_lose_only_digits(method: str, digits: float) -> None:
    job = ZOO["mlp"].job(batch=7, steps=1)
    one = run_serially(job, resolve("single", 1), 1, torch.float64)
    record = run_serially(job, compressed(method), 1, torch.float64)
    assert record.losses[0] == pytest.approx(one.losses[0], rel=1e-12), "scalars are not compressed"
    for name, tensor in one.gradients[0].items():
        largest = float(tensor.abs().max())
        difference = float((record.gradients[0][name] - tensor).abs().max())
        assert difference <= 3 * digits * largest + 1e-6
    assert any((record.gradients[0][n] != g).any() for n, g in one.gradients[0].items())


@pytest.mark.parametrize("sync", [Sync(compress="powersgd", compress_rank=1), Sync(compress="topk")])
def test_what_was_sent_and_what_stays_are_all_gradients(sync: Sync) -> None:
    bucket = Bucket(
        parameters=("a", "b", "c", "d"), shapes=SHAPES, dtype=torch.float64, axis="data"
    )  # the last matrix is smaller than its factors
    ranks = [Compressor(NoLinks()) for _ in range(3)]
    generator = torch.Generator().manual_seed(0)
    given = torch.zeros(bucket.num_elements, dtype=torch.float64)
    sent = torch.zeros_like(given)
    for _ in range(4):
        flats = [torch.randn(bucket.num_elements, generator=generator, dtype=torch.float64) for _ in ranks]
        given += sum(flats)
        sums: list[list[Tensor]] = [[] for _ in ranks]
        for part in range(len(messages(bucket, sync))):
            made = [
                one.compress(bucket, flat, sync, part, own[0] if own else None)
                for one, flat, own in zip(ranks, flats, sums, strict=True)
            ]
            total = torch.cat(made) if sync.compress == "topk" else made[0] + made[1] + made[2]
            for own in sums:
                own.append(total.clone())
        for one, flat, own in zip(ranks, flats, sums, strict=True):
            one.decompress(bucket, flat, sync, own)
        assert all(torch.equal(flat, flats[0]) for flat in flats)
        sent += flats[0]
    stays = [one.rest(bucket) for one in ranks]
    assert all(rest is not None and rest.abs().max() > 0.1 for rest in stays)
    torch.testing.assert_close(sent + sum(stays), given, rtol=0, atol=1e-12)  # type: ignore[arg-type]


def program_of(method: str, **settings: Any) -> Program:
    job = ZOO["mlp"].job(batch=8)
    plan = resolve("ddp", 2, {"sync": {"compress": method, **settings}})
    return Programs(job, open_data(job.data, None), plan, torch.device("cpu")).for_sizes([(4, 4)])


def sent_bytes(program: Program) -> int:
    """Of gradients and the loss."""
    sums = [i for i in program.of(0).instructions if isinstance(i, Collective) and i.reads != (WEIGHT,)]
    return sum(i.num_bytes for i in sums)


def test_the_program_knows_its_bytes() -> None:
    whole = sent_bytes(program_of("none"))
    assert sent_bytes(program_of("fp16")) < 0.51 * whole
    assert sent_bytes(program_of("powersgd", compress_rank=1)) < 0.3 * whole
    elements = (whole - 4) // 4
    assert sent_bytes(program_of("topk", compress_keep=0.01)) == 2 * 8 * round(0.01 * elements) + 4
    program = program_of("powersgd")
    spans = [span for span in simulate(program, lambda rank, instruction: 1.0).spans if span.rank == 0]
    assert sum(span.num_bytes for span in spans if "weight" not in span.name) == sent_bytes(program)
    (told,) = program.notices
    assert (
        "lossy" in told
        and "not part of checkpoints" in told
        and f"instead of {format_bytes(whole - 4)}" in told
    )
    assert {"compress bucket 0", "compress bucket 0, part 1", "decompress bucket 0"} <= {
        s.name for s in spans
    }


def test_a_bucket_that_is_not_turned_back_is_found() -> None:
    program = program_of("powersgd")
    instructions = list(program.classes[0].instructions)
    filled = [i for i in instructions if isinstance(i, Accumulate) and i.bucket == 0]
    back = next(i for i in instructions if isinstance(i, Decompress))
    late = replace(back, id=len(instructions))
    others = [i for i in instructions if i is not back]
    for planted, told in ((others, "turned back once"), ([*others, late], "in another order")):
        with pytest.raises(ProgramError, match=told):
            check_compressed(
                replace(program.classes[0], instructions=tuple(planted)), 0, program.plan.sync, filled
            )
        with pytest.raises(ProgramError):
            check_program(with_instructions(program, planted))


@pytest.mark.parametrize("method", ["fp16", "powersgd", "topk"])
def test_models_that_cannot_be_captured(method: str) -> None:
    job = uncapturable_job()
    exact = run_serially(job, resolve("ddp", 2), 2, torch.float64)
    record = run_serially(job, compressed(method, compress_keep=1.0, compress_rank=1), 2, torch.float64)
    assert record.spread == 0.0
    assert record.losses[0] == pytest.approx(exact.losses[0], rel=1e-12)
    if method == "topk":
        assert record.losses == pytest.approx(exact.losses, rel=1e-12)


@pytest.mark.parametrize(
    ("plan", "settings"),
    [
        ("zero2", {}),
        ("1f1b", {}),
        ("local-sgd", {}),
        ("ddp", {"compress_keep": 0.0}),
        ("ddp", {"compress_rank": 0}),
    ],
)
def test_refusals(plan: str, settings: dict[str, Any]) -> None:
    with pytest.raises(PlanError):
        resolve(plan, 2, {"sync": {"compress": "topk", **settings}})


def test_verify_says_that_it_is_lossy() -> None:
    with pytest.raises(UsageError, match="lossy"):
        verify(small_job(), "ddp", 2, serial=True, settings={"sync": {"compress": "topk"}})
