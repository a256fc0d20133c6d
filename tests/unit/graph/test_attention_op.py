"""plait::attention: equal to torch's attention, one node each way in a captured graph."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from plait.graph.ops.attention import IMPLEMENTATIONS, AttentionCapture, attention, attention_backward

FORWARD = torch.ops.plait.attention.default
BACKWARD = torch.ops.plait.attention_backward.default


def heads(
    batch: int, length: int, dim: int, dtype: torch.dtype = torch.float32, num_heads: int = 3
) -> Tensor:
    return torch.randn(batch, length, num_heads, dim, dtype=dtype).transpose(1, 2).requires_grad_()


def with_gradients(function: Callable[..., Tensor], *inputs: Tensor, **options: Any) -> tuple[Tensor, ...]:
    out = function(*inputs, **options)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
    return (out, *torch.autograd.grad((out * weights).sum(), inputs))


def captured_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    with AttentionCapture():
        return F.scaled_dot_product_attention(q, k, v, **options)


def mask_of(kind: str, batch: int, length: int, keys: int, dtype: torch.dtype) -> Tensor | None:
    if kind == "none" or kind == "causal":
        return None
    if kind == "bool":
        mask = torch.rand(batch, 1, length, keys) > 0.3
        mask[0, 0, 1] = False  # a query that sees nothing
        return mask
    if kind == "padding":
        return torch.rand(batch, 1, 1, keys) > 0.3
    return torch.randn(length, keys, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", ["none", "causal", "bool", "padding", "float"])
@pytest.mark.parametrize(("length", "keys"), [(5, 5), (40, 33), (33, 40)])
def test_bit_equal_to_torch_on_cpu(dtype: torch.dtype, kind: str, length: int, keys: int) -> None:
    inputs = (heads(2, length, 8, dtype), heads(2, keys, 8, dtype), heads(2, keys, 8, dtype))
    options = {"attn_mask": mask_of(kind, 2, length, keys, dtype), "is_causal": kind == "causal"}
    expected = with_gradients(F.scaled_dot_product_attention, *inputs, **options)
    actual = with_gradients(captured_attention, *inputs, **options)
    for left, right in zip(actual, expected, strict=True):
        assert torch.equal(left, right)
        assert left.stride() == right.stride()


@pytest.mark.parametrize("kind", ["none", "causal", "bool", "padding", "float"])
def test_math_where_flash_does_not_apply(kind: str) -> None:
    """Values narrower than keys. Tolerance: a few roundings of float64."""
    inputs = (heads(2, 5, 8, torch.float64), heads(2, 7, 8, torch.float64), heads(2, 7, 6, torch.float64))
    options = {"attn_mask": mask_of(kind, 2, 5, 7, torch.float64), "is_causal": kind == "causal"}
    expected = with_gradients(F.scaled_dot_product_attention, *inputs, **options)
    actual = with_gradients(captured_attention, *inputs, **options)
    for left, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-13)


def test_math_in_bfloat16_keeps_dtypes() -> None:
    inputs = (heads(2, 5, 8, torch.bfloat16), heads(2, 7, 8, torch.bfloat16), heads(2, 7, 6, torch.bfloat16))
    for left, right in zip(
        with_gradients(captured_attention, *inputs),
        with_gradients(F.scaled_dot_product_attention, *inputs),
        strict=True,
    ):
        assert left.dtype == torch.bfloat16
        torch.testing.assert_close(left, right, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("mask_dims", [None, 2, 3])
def test_three_dims(mask_dims: int | None) -> None:
    q, k, v = (torch.randn(4, length, 8, requires_grad=True) for length in (5, 6, 6))
    mask = None if mask_dims is None else torch.randn((4, 5, 6)[3 - mask_dims :])
    expected = with_gradients(F.scaled_dot_product_attention, q, k, v, attn_mask=mask)
    actual = with_gradients(captured_attention, q, k, v, attn_mask=mask)
    for left, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(left, right)


def test_grouped_heads_and_scale() -> None:
    q, k, v = heads(2, 5, 8, num_heads=6), heads(2, 5, 8, num_heads=2), heads(2, 5, 8, num_heads=2)
    options = {"enable_gqa": True, "is_causal": True, "scale": 0.3}
    expected = with_gradients(F.scaled_dot_product_attention, q, k, v, **options)
    actual = with_gradients(captured_attention, q, k, v, **options)
    for left, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize(("batch", "length", "keys"), [(0, 5, 5), (2, 0, 5), (2, 5, 0)])
def test_empty(batch: int, length: int, keys: int) -> None:
    q, k, v = heads(batch, length, 8), heads(batch, keys, 8), heads(batch, keys, 8)
    out, grad_q, grad_k, grad_v = with_gradients(
        captured_attention, q, k, v, attn_mask=torch.zeros(length, keys)
    )
    assert out.shape == (batch, 3, length, 8)
    for result, shape in ((out, q), (grad_q, q), (grad_k, k), (grad_v, v)):
        assert result.shape == shape.shape
        assert not result.any()


def test_causal_and_mask_are_refused() -> None:
    q = heads(1, 4, 8)
    with pytest.raises(RuntimeError, match="not both"):
        captured_attention(q, q, q, attn_mask=torch.zeros(4, 4), is_causal=True)


@pytest.mark.parametrize("kind", ["none", "causal", "bool", "float"])
def test_plain_ops_with_a_learned_mask_or_dropout(kind: str) -> None:
    """The gradient of the mask is torch's; the dropped weights average to the undropped ones."""
    inputs = (heads(2, 5, 8, torch.float64), heads(2, 7, 8, torch.float64), heads(2, 7, 8, torch.float64))
    mask = mask_of(kind, 2, 5, 7, torch.float64)
    options: dict[str, Any] = {"is_causal": kind == "causal", "attn_mask": mask}
    if kind == "float":
        assert mask is not None
        mask[1] = -torch.inf

        def biased(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
            return with_gradients(lambda *x: function(*x[:3], attn_mask=x[3]), *inputs, mask.requires_grad_())

        for left, right in zip(
            biased(captured_attention), biased(F.scaled_dot_product_attention), strict=True
        ):
            torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-13)
        return
    expected = F.scaled_dot_product_attention(*inputs, **options)
    draws = torch.stack([captured_attention(*inputs, dropout_p=0.2, **options).detach() for _ in range(500)])
    assert not torch.equal(draws[0], draws[1])
    # A draw deviates by about sqrt(0.2/0.8) times values of order 1: 6 standard errors of 500 draws.
    torch.testing.assert_close(draws.mean(0), expected.detach(), rtol=0, atol=0.5 * 6 / 500**0.5)


def trace(function: Callable[..., Any], *inputs: Any) -> fx.GraphModule:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, AttentionCapture():
        fakes = torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, inputs)
        return make_fx(function)(*fakes)


def count(module: fx.GraphModule, target: Any) -> int:
    return sum(node.target is target for node in module.graph.nodes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_node_each_way_that_runs_like_eager(dtype: torch.dtype) -> None:
    inputs = [heads(2, 5, 8, dtype) for _ in range(3)]

    def step(*inputs: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        return with_gradients(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), *leaves
        )

    module = trace(step, *inputs)
    assert count(module, FORWARD) == count(module, BACKWARD) == 1
    assert not any("scaled_dot_product" in str(node.target) for node in module.graph.nodes)
    for node in module.graph.nodes:
        if node.target is FORWARD:
            q, k, v = (x.detach() for x in inputs)
            real = attention(q, k, v, None, True, 8**-0.5)
            assert [(x.stride(), x.dtype) for x in real] == [(x.stride(), x.dtype) for x in node.meta["val"]]
    for left, right in zip(module(*inputs), step(*inputs), strict=True):
        assert torch.equal(left, right)


def test_autocast_reaches_the_op() -> None:
    q = heads(1, 4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(captured_attention(q, q, q), F.scaled_dot_product_attention(q, q, q))
        assert captured_attention(q, q, q).dtype == torch.bfloat16


def test_transformer_encoder_layer_is_captured() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    original = F.scaled_dot_product_attention
    module = trace(lambda x: layer(x).sum(), torch.randn(2, 5, 16))
    assert count(module, FORWARD) == 1
    assert F.scaled_dot_product_attention is original


def test_implementations_are_read_only() -> None:
    assert dict(IMPLEMENTATIONS) == {FORWARD: attention, BACKWARD: attention_backward}
    with pytest.raises(TypeError):
        IMPLEMENTATIONS[FORWARD] = attention  # type: ignore[index]


def test_ops_pass_torchs_own_checks() -> None:
    q, k, v = (x.detach() for x in (heads(2, 5, 8), heads(2, 7, 8), heads(2, 7, 8)))
    out, lse = attention(q, k, v, None, False, 0.3)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(FORWARD, (q, k, v, None, False, 0.3), test_utils=checks)
    torch.library.opcheck(
        BACKWARD, (torch.randn_like(out), q, k, v, out, lse, None, False, 0.3), test_utils=checks
    )


def hugging_face(name: str, dropout: float) -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    ids = torch.randint(0, 64, (2, 6))
    inputs = {"input_ids": ids, "labels": ids}
    if name == "gpt2":
        sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
        drops = {"attn_pdrop": dropout, "resid_pdrop": dropout, "embd_pdrop": dropout}
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(use_cache=False, **sizes, **drops)
        ), inputs
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4}
    if name == "llama":
        config = transformers.LlamaConfig(
            num_key_value_heads=2, use_cache=False, attention_dropout=dropout, **sizes
        )
        return transformers.LlamaForCausalLM(config), inputs
    if name == "bert":
        drops = {"attention_probs_dropout_prob": dropout, "hidden_dropout_prob": dropout}
        config = transformers.BertConfig(max_position_embeddings=16, **sizes, **drops)
        return transformers.BertForMaskedLM(config), inputs | {"attention_mask": torch.ones_like(ids)}
    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(dropout_rate=dropout, use_cache=False, decoder_start_token_id=0, **sizes)
    return transformers.T5ForConditionalGeneration(config), inputs


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_hugging_face_models_trace(name: str, dropout: float) -> None:
    model, inputs = hugging_face(name, dropout)
    parameters = dict(model.named_parameters())

    def step(parameters: dict[str, Tensor], inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
        leaves = {name: parameter.detach().requires_grad_() for name, parameter in parameters.items()}
        loss = functional_call(model, leaves, kwargs=inputs).loss
        return (loss, *torch.autograd.grad(loss, list(leaves.values())))

    values = {name: parameter.detach() for name, parameter in parameters.items()}
    module = trace(step, values, inputs)
    assert not any("scaled_dot_product" in str(node.target) for node in module.graph.nodes)
    # T5 attends to itself with a learned position bias (plain ops), and to its encoder without (our op).
    expected_nodes = 0 if dropout else 2
    assert count(module, FORWARD) == count(module, BACKWARD) == expected_nodes
    if not dropout:
        for left, right in zip(module(values, inputs), step(values, inputs), strict=True):
            torch.testing.assert_close(left, right)
