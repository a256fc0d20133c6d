"""Models on paper: their numbers are those of their papers, and they can be captured and trained."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from plait.errors import JobError
from plait.graph.from_job import Captures
from plait.job.paper import KNOWN, TransformerShape, paper_job, read_shape
from plait.job.paper.job import build

PARAMETERS = {
    "gpt2": 124.4e6,
    "gpt2-xl": 1558e6,
    "gpt3-175b": 174.6e9,
    "bert-large": 335e6,
    "llama3-8b": 8.03e9,
    "llama3-70b": 70.6e9,
    "llama3-405b": 405.8e9,
    "resnet50": 25.56e6,
    "alexnet": 61.1e6,
}
"""As published; BERT's count here is without the pooler, with the head over words."""


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_those_of_the_paper(name: str) -> None:
    with FakeTensorMode():
        model = build(KNOWN[name])
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == pytest.approx(PARAMETERS[name], rel=0.005)


@pytest.mark.parametrize("attention", ["fused", "plain"])
@pytest.mark.parametrize("name", ["gpt", "bert-base", "llama"])
def test_transformers_are_captured_and_give_a_gradient(name: str, attention: str) -> None:
    heads, dropout = (2 if name == "llama" else 4), (0.1 if name == "gpt" else 0.0)
    shape = read_shape(
        f"{name}:layers=2,hidden=32,heads=4,kv_heads={heads},ffn=64,seq=16,vocab=64,attention={attention},"
        f"dropout={dropout},precision=fp32"
    )
    job = paper_job(shape, batch=2)
    captures = Captures(job)
    graph = captures.of_size(2)
    assert not graph.unused
    fused = any("plait.attention" in str(node.target) for node in graph.ops())
    assert fused == (attention == "fused")
    model = job.build_model()
    loss = job.objective_of(model, captures.source.fetch(torch.arange(2)))
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_causal_models_do_not_see_the_future() -> None:
    """Fused and plain attention of one model agree, and a later word does not change an earlier output."""
    outputs = []
    for attention in ("fused", "plain"):
        shape = read_shape(
            f"llama:layers=1,hidden=32,heads=4,kv_heads=2,ffn=64,seq=8,vocab=64,attention={attention}"
        )
        torch.manual_seed(0)
        model = build(shape)
        words = torch.randint(64, (1, 8), generator=torch.Generator().manual_seed(1))
        outputs.append(model(words))
        changed = words.clone()
        changed[0, -1] = (changed[0, -1] + 1) % 64
        torch.testing.assert_close(model(changed)[:, :-1], outputs[-1][:, :-1])
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)


def test_text_forms() -> None:
    shape = read_shape("gpt:layers=96,hidden=12288,heads=96,seq=2048,vocab=51200")
    assert shape == KNOWN["gpt3-175b"]
    llama = read_shape("llama3-8b:layers=4, tied=true")
    assert isinstance(llama, TransformerShape)
    assert (llama.layers, llama.tied, llama.kv_heads) == (4, True, 8)
    for text, words in (
        ("gtp2", "did you mean 'gpt2'"),
        ("gpt:depth=3", "depth=3"),
        ("gpt:layers=many", "not a number"),
        ("gpt:heads=7", "do not divide"),
        ("gpt:attention=quick", "fused, plain"),
        ("resnet50:layers=51", "layers=51"),
    ):
        with pytest.raises(JobError, match=words):
            read_shape(text)
