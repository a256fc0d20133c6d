"""plait's random ops: the same numbers however the tensor is split, and numbers that look random."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from plait.graph.ops import random as random_ops
from plait.graph.ops import random_hash
from plait.graph.ops.random import IMPLEMENTATIONS, random_key
from plait.graph.ops.replay import NotReplayableError, Replay
from plait.graph.rewrite.random_ops import rewrite_random
from plait.run.eager.draws import SampleDraws
from plait.torch_private.intercept import intercepted

F32 = torch.float32
OPS: dict[str, tuple[Any, ...]] = {
    "bernoulli": (F32, 0.3),
    "uniform": (F32, -1.0, 2.0),
    "normal": (F32, 0.5, 2.0),
    "randint": (torch.int64, -3, 1000),
}


def draw(name: str, key: Tensor, shape: tuple[int, ...], op: int = 3, **placement: Any) -> Tensor:
    result: Tensor = getattr(random_ops, name)(key, op, shape, *OPS[name], **placement)
    return result


def uniform(
    shape: tuple[int, ...] = (512, 512), *, seed: int = 0, step: int = 0, op: int = 0, **placement: Any
) -> Tensor:
    key = random_key(seed=seed, step=step)
    return random_ops.uniform(key, op, shape, torch.float64, 0.0, 1.0, **({"batch_dim": 0} | placement))


def correlation(left: Tensor, right: Tensor) -> float:
    """In standard errors, for independent uniform numbers."""
    return float(((left - 0.5) * (right - 0.5)).mean()) * 12 * math.sqrt(left.numel())


def chi_square(counts: Tensor) -> float:
    """In standard deviations from what equal chances give."""
    expected = counts.sum() / counts.numel()
    freedom = counts.numel() - 1
    return (float(((counts - expected) ** 2 / expected).sum()) - freedom) / math.sqrt(2 * freedom)


def pair_chi_square(left: Tensor, right: Tensor, cells: int = 16) -> float:
    index = (left * cells).long() * cells + (right * cells).long()
    return chi_square(torch.bincount(index.flatten(), minlength=cells * cells).double())


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(
    ("shape", "batch_dim", "rows_per_sample"),
    [
        ((7, 33), 0, 1),
        ((7 * 5, 33), 0, 5),
        ((3, 7, 5, 4), 1, 1),
        ((6, 7), 1, 1),
        ((7,), 0, 1),
        ((7, 3, 300, 301), 0, 1),
    ],
)
def test_shares_concatenate_to_the_whole(
    name: str, shape: tuple[int, ...], batch_dim: int, rows_per_sample: int
) -> None:
    placement = {"batch_dim": batch_dim, "rows_per_sample": rows_per_sample}
    whole = draw(name, random_key(seed=1, step=2), shape, **placement)
    pieces, first = [], 0
    for num_samples in (3, 0, 1, 3):
        share = list(shape)
        share[batch_dim] = num_samples * rows_per_sample
        key = random_key(seed=1, step=2, first_sample=first)
        pieces.append(draw(name, key, tuple(share), **placement))
        first += num_samples
    assert torch.equal(torch.cat(pieces, batch_dim), whole)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("batch_dim", [-1, 0, 1])
@pytest.mark.parametrize("full", [(4, 6, 10), (4, 300, 500), (3, 4, 70000)])
def test_slices_of_any_dim_equal_the_whole(name: str, batch_dim: int, full: tuple[int, ...]) -> None:
    whole = draw(name, random_key(seed=1, step=2), full, batch_dim=batch_dim)
    window = [(1, 2), (0, full[1]) if batch_dim == 1 else (2, 2), (3, 4)]
    if batch_dim == 0:
        window[0] = (0, full[0])
    shape = tuple(extent for _, extent in window)
    start = [first for first, _ in window]
    piece = draw(name, random_key(seed=1, step=2), shape, full=full, start=start, batch_dim=batch_dim)
    assert torch.equal(piece, whole[tuple(slice(first, first + extent) for first, extent in window)])


@pytest.mark.parametrize("batch_dim", [-1, 0, 1, 2])
@pytest.mark.parametrize("shape", [(6, 7, 8), (2, 3, 200, 400), (3, 70000, 2)])
def test_no_two_elements_share_an_index(batch_dim: int, shape: tuple[int, ...]) -> None:
    """Equal 32-bit numbers come by chance only: n**2 / 2**33 pairs are expected, 27 of 480 000 elements'."""
    values = uniform(shape, batch_dim=batch_dim)
    expected = values.numel() ** 2 / 2**33
    assert values.numel() - values.unique().numel() <= expected + 5 * math.sqrt(expected) + 1


@pytest.mark.parametrize("name", OPS)
def test_blocks_and_threads_do_not_matter(name: str) -> None:
    """More rows than a block holds, and a number that no vector width divides."""
    shape = (501, 211)
    single = draw(name, random_key(seed=1, step=2), shape, batch_dim=0)
    torch.set_num_threads(2)
    assert torch.equal(draw(name, random_key(seed=1, step=2), shape, batch_dim=0), single)
    row = draw(name, random_key(seed=1, step=2, first_sample=500), (1, 211), batch_dim=0)
    assert torch.equal(row, single[500:])


def test_the_numbers_stay_what_they_are() -> None:
    """A change of the hash would break the resuming of runs: these were written down once."""
    values = random_ops.randint(
        random_key(seed=1, step=2, micro_batch=3), 4, (2, 4), torch.int64, 0, 1000, batch_dim=0
    )
    assert values.tolist() == [[75, 944, 220, 827], [638, 906, 94, 787]]


def test_the_mix_is_the_same_for_numbers_and_tensors() -> None:
    values = [0, 1, -1, 2**62 + 12345, -(2**63)]
    assert random_hash._mix64_(torch.tensor(values)).tolist() == [
        random_hash.mix64(value) for value in values
    ]


def test_every_part_of_the_key_matters() -> None:
    def bits(
        op: int = 0, seed: int = 1, step: int = 2, micro_batch: int = 0, first_sample: int = 0
    ) -> Tensor:
        key = random_key(seed=seed, step=step, micro_batch=micro_batch, first_sample=first_sample)
        return random_ops.bernoulli(key, op, (64, 64), torch.bool, 0.5, batch_dim=0)

    base = bits()
    for other in (
        bits(op=1),
        bits(seed=2),
        bits(step=3),
        bits(micro_batch=1),
        bits(first_sample=64),
        bits(seed=2**70 + 7),
    ):
        # Half of 4096 bits agree: 32 is one standard deviation.
        assert abs(int((base == other).sum()) - 2048) < 5 * 32
    assert torch.equal(bits(), base)


def test_uniform_is_uniform() -> None:
    values = uniform()
    count = values.numel()
    assert float(values.min()) >= 0.0
    assert float(values.max()) < 1.0
    assert abs(float(values.mean()) - 0.5) * math.sqrt(12 * count) < 4
    assert abs(float(values.var()) - 1 / 12) * math.sqrt(180 * count) < 4
    assert abs(chi_square(torch.histc(values, 1000, 0.0, 1.0))) < 4


def test_bits_are_fair() -> None:
    hashes = (uniform() * 2**32).long()
    for bit in range(32):
        assert abs(float((hashes >> bit & 1).double().mean()) - 0.5) * 2 * math.sqrt(hashes.numel()) < 4.5


@pytest.mark.parametrize("shape", [(512, 512), (1, 1 << 18), (1 << 16, 4), (1 << 18, 1), (64, 64, 64)])
@pytest.mark.parametrize("seed", [0, 1, 2, 12345])
def test_neighbours_are_independent(shape: tuple[int, ...], seed: int) -> None:
    flat = uniform(shape, seed=seed).flatten()
    for lag in (1, 2, 3, shape[-1], 2 * shape[-1], 4096):
        if lag < flat.numel():
            assert abs(correlation(flat[lag:], flat[:-lag])) < 4.5
            assert pair_chi_square(flat[lag:], flat[:-lag]) < 5


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"step": 1}, {"op": 1}, {"seed": 1, "step": -1 % 7}, {"seed": 1 << 32}]
)
def test_seeds_steps_and_ops_are_independent(change: dict[str, int]) -> None:
    left, right = uniform(), uniform(**change)  # type: ignore[arg-type]
    assert abs(correlation(left, right)) < 4
    assert abs(pair_chi_square(left, right)) < 4.5


@pytest.mark.parametrize("bit", [31, 30, 24, 16, 8])
def test_no_two_samples_or_positions_are_alike(bit: int) -> None:
    """All pairs of 512 rows (and columns): the largest of 130 816 correlations stays under 6 standard errors."""
    signs = ((uniform() * 2**32).long() >> bit & 1).double() * 2 - 1
    for table in (signs, signs.T):
        pairs = (table @ table.T / math.sqrt(table.shape[1])).fill_diagonal_(0.0)
        assert float(pairs.abs().max()) < 6
    for lag in (1, 2, 16, 256):
        # Rectangles: four corners multiply to a fair sign only where rows and columns mix non-linearly.
        corners = signs[lag:, lag:] * signs[:-lag, lag:] * signs[lag:, :-lag] * signs[:-lag, :-lag]
        assert abs(float(corners.mean())) * math.sqrt(corners.numel()) < 4.5


@pytest.mark.parametrize("p", [0.0, 1e-3, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("dtype", [F32, torch.bool, torch.bfloat16, torch.float64])
def test_bernoulli(p: float, dtype: torch.dtype) -> None:
    mask = random_ops.bernoulli(random_key(seed=0, step=0), 0, (512, 512), dtype, p, batch_dim=0)
    assert mask.dtype == dtype
    assert set(mask.unique().tolist()) <= {0, 1}
    mean = float(mask.double().mean())
    assert abs(mean - p) <= 4 * math.sqrt(p * (1 - p) / mask.numel())
    if 0 < p < 1:
        for dim in (0, 1):
            spread = float(mask.double().sum(dim).var()) / (512 * p * (1 - p))
            assert abs(spread - 1) < 5 * math.sqrt(2 / 512) + 1 / (512 * p * (1 - p))


@pytest.mark.parametrize("dtype", [F32, torch.float64, torch.bfloat16, torch.float16])
def test_uniform_and_normal_dtypes(dtype: torch.dtype) -> None:
    key = random_key(seed=0, step=0)
    values = random_ops.uniform(key, 0, (256, 256), dtype, 0.0, 1.0)
    assert values.dtype == dtype
    assert float(values.max()) < 1.0
    assert float(values.min()) >= 0.0
    # A bfloat16 grid of 2**-8 rounds the mean down by half a step.
    assert abs(float(values.double().mean()) - 0.5) < 4 / math.sqrt(12 * 65536) + torch.finfo(dtype).eps / 2
    normal = random_ops.normal(key, 0, (256, 256), dtype, 1.0, 2.0).double()
    assert abs(float(normal.mean()) - 1.0) < 4 * 2 / 256 + torch.finfo(dtype).eps
    assert abs(float(normal.std()) - 2.0) < 4 * 2 / math.sqrt(2 * 65536) + torch.finfo(dtype).eps
    standard = (normal - 1) / 2
    assert abs(float((standard**3).mean())) < 4 * math.sqrt(15) / 256 + 3 * torch.finfo(dtype).eps
    assert abs(float((standard**4).mean()) - 3) < 4 * math.sqrt(96) / 256 + 3 * torch.finfo(dtype).eps


def test_randint_is_fair_and_refuses_wide_ranges() -> None:
    key = random_key(seed=0, step=0)
    values = random_ops.randint(key, 0, (512, 512), torch.int64, -3, 97)
    assert (int(values.min()), int(values.max())) == (-3, 96)
    assert abs(chi_square(torch.bincount((values + 3).flatten(), minlength=100).double())) < 4
    with pytest.raises(ValueError, match="has 2147483649"):
        random_ops.randint(key, 0, (2,), torch.int64, 0, 2**31 + 1)


def test_implementations_are_the_ops() -> None:
    assert {str(op) for op in IMPLEMENTATIONS} == {f"plait.{name}.default" for name in OPS}
    key = random_key(seed=3, step=4)
    for op, function in IMPLEMENTATIONS.items():
        parameters = OPS[op._opname]
        assert torch.equal(
            op(key, 1, [4, 5], *parameters, batch_dim=0), function(key, 1, [4, 5], *parameters, batch_dim=0)
        )
        torch.library.opcheck(
            op, (key, 1, [4, 5], *parameters), test_utils=("test_schema", "test_faketensor")
        )
    with pytest.raises(TypeError):
        IMPLEMENTATIONS[op] = function  # type: ignore[index]


def rewritten(
    function: Callable[..., Any], *inputs: Tensor, num_samples: int | None = None
) -> tuple[fx.GraphModule, Any]:
    """The functional graph of (key, *inputs) with its random ops replaced."""
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (random_key(seed=0, step=0), *inputs)]
        module = make_fx(functionalize(lambda key, *rest: (key + 0, function(*rest))))(*fakes)
    key = next(iter(module.graph.nodes))
    outcome = rewrite_random(module.graph, key, num_samples)
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
    return module, outcome


RANDOM_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "feature_dropout": lambda x: F.dropout2d(x[:, :, None, None], 0.5),
    "bernoulli_tensor": lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
    "bernoulli_tensor_": lambda x: torch.empty_like(x).bernoulli_(torch.full_like(x, 0.5)),
    "rand": lambda x: torch.rand(8, 6),
    "rand_like": lambda x: torch.rand_like(x),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 1),
    "randn": lambda x: torch.randn(8, 6),
    "randn_like": lambda x: torch.randn_like(x),
    "normal_": lambda x: torch.empty_like(x).normal_(1.0, 2.0),
    "normal_tensor": lambda x: torch.normal(x, torch.ones_like(x)),
    "randint": lambda x: torch.randint(0, 9, (8, 6)),
    "randint_like": lambda x: torch.randint_like(x, 2, 9),
    "random_": lambda x: torch.empty_like(x).random_(9),
    "exponential_": lambda x: torch.empty_like(x).exponential_(2.0),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, hard=True),
    "multinomial": lambda x: torch.multinomial(x, 2),
}


@pytest.mark.parametrize("name", RANDOM_FUNCTIONS)
def test_every_random_op_is_replaced(name: str) -> None:
    x = torch.ones(8, 6)
    function = RANDOM_FUNCTIONS[name]
    module, outcome = rewritten(function, x, num_samples=4)
    assert (outcome.num_rewritten, outcome.unsupported) == (1, ())
    (node,) = [node for node in module.graph.nodes if node.target in IMPLEMENTATIONS]
    assert (node.kwargs["batch_dim"], node.kwargs["rows_per_sample"]) == (0, 2)
    first = module(random_key(seed=0, step=0), x)[1]
    assert first.shape == function(x).shape
    assert first.dtype == function(x).dtype
    assert torch.equal(module(random_key(seed=0, step=0), x)[1], first)
    assert not torch.equal(module(random_key(seed=0, step=1), x)[1], first)
    for created in module.graph.nodes:
        if created.op == "call_function":
            assert "val" in created.meta


@pytest.mark.parametrize("name", RANDOM_FUNCTIONS)
def test_eager_code_draws_the_numbers_of_its_graph(name: str) -> None:
    """To the bit, in float32 and as float64 code of a float32 graph does; so there is one rule an op."""
    x, key = torch.rand(8, 6), random_key(seed=0, step=0)
    module, _ = rewritten(RANDOM_FUNCTIONS[name], x, num_samples=4)
    with intercepted(Replay(module.graph.nodes, key).takers()):
        replayed = RANDOM_FUNCTIONS[name](x)
    assert torch.equal(replayed, module(key, x)[1])
    with intercepted(Replay(module.graph.nodes, key).takers()):
        wide = RANDOM_FUNCTIONS[name](x.double())
    torch.testing.assert_close(wide.float(), replayed.float(), rtol=1e-6, atol=1e-6)
    with intercepted(Replay(module.graph.nodes, key).takers()):
        RANDOM_FUNCTIONS[name](x)
        with pytest.raises(NotReplayableError):  # one draw more than the graph has
            RANDOM_FUNCTIONS[name](x)


@pytest.mark.parametrize("name", RANDOM_FUNCTIONS)
def test_code_that_is_not_captured_draws_by_the_same_rules(name: str) -> None:
    x, function = torch.rand(8, 6), RANDOM_FUNCTIONS[name]
    draws = SampleDraws(random_key(seed=0, step=0), num_samples=4, model=nn.Identity())
    with intercepted(draws.takers()):
        made = function(x)
    assert (made.shape, made.dtype) == (function(x).shape, function(x).dtype)
    assert draws.others == {}
    assert len(draws.seen) == 1


def test_exponential_clocks_and_what_they_choose() -> None:
    x = torch.ones(4096, 3)
    made = rewritten(RANDOM_FUNCTIONS["exponential_"], x)[0](random_key(seed=0, step=0), x)[1]
    assert made.mean().item() == pytest.approx(0.5, abs=0.02)
    assert made.min() > 0
    rates = torch.tensor([[1.0, 2.0, 5.0]]).expand(4096, 3)
    chosen = rewritten(lambda r: torch.multinomial(r, 1), rates)[0](random_key(seed=0, step=0), rates)[1]
    shares = torch.bincount(chosen.flatten(), minlength=3) / 4096
    torch.testing.assert_close(shares, torch.tensor([0.125, 0.25, 0.625]), atol=0.03, rtol=0)


def test_ops_are_numbered() -> None:
    module, outcome = rewritten(lambda x: F.dropout(F.dropout(x, 0.5) + torch.rand(3), 0.5), torch.ones(4, 3))
    nodes = [node for node in module.graph.nodes if node.target in IMPLEMENTATIONS]
    assert outcome.num_rewritten == 3
    assert [node.args[1] for node in nodes] == [0, 1, 2]
    assert {node.kwargs["batch_dim"] for node in nodes} == {-1}


def test_dropout_scales_what_it_keeps() -> None:
    for name in ("dropout", "native_dropout"):
        module, _ = rewritten(RANDOM_FUNCTIONS[name], torch.ones(8, 6))
        assert set(module(random_key(seed=0, step=0), torch.ones(8, 6))[1].unique().tolist()) == {0.0, 2.0}


def test_unsupported_ops_are_named_once() -> None:
    def function(x: Tensor) -> Tensor:
        return (
            torch.randperm(8)
            + torch.randperm(8)
            + torch.multinomial(x, 2, True).sum()
            + torch.poisson(x).sum()
        )

    _, outcome = rewritten(function, torch.ones(8, 6))
    assert outcome.num_rewritten == 0
    assert outcome.unsupported == (
        "aten.randperm.default",
        "aten.multinomial.default",
        "aten.poisson.default",
    )


def test_ops_that_draw_nothing_are_left_alone() -> None:
    def function(x: Tensor) -> Tensor:
        heads = x.view(1, 2, 4, 6)
        out = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(heads, heads, heads)[0]
        return out.sum() + torch.native_dropout(x, 0.5, False)[0].sum()

    _, outcome = rewritten(function, torch.ones(8, 6))
    assert (outcome.num_rewritten, outcome.unsupported) == (0, ())
