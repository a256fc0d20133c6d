"""A sample of the coverage sweep: models that others wrote, small by rule, are captured and equal to their own loop.

Each is tried under one plan, in turn; all of them under all plans are in `bench/coverage.py`.
"""

import pytest
import torch

PLANS = ("ddp", "zero3", "1f1b", "single")
TRANSFORMERS = (
    "gpt2", "bert", "llama", "distilbert", "opt", "gpt_neox", "albert", "vit", "qwen2", "bloom", "electra", "deit",
    "mistral", "phi", "fnet", "bart", "roberta", "ctrl", "openai-gpt", "xglm", "biogpt", "gptj",
)  # fmt: skip
GEOMETRIC = (
    "GCN2Conv", "AGNNConv", "GraphSizeNorm", "SSGConv", "EdgeConv", "PointNetConv", "PairNorm", "GATConv", "LGConv",
    "GraphNorm", "FAConv", "GCNConv", "SGConv", "InstanceNorm", "SimpleConv", "ChebConv", "LayerNorm", "GeneralConv",
)  # fmt: skip
NAMES = [
    *(f"transformers/{name}" for name in TRANSFORMERS),
    *(f"torch_geometric/{name}" for name in GEOMETRIC),
]
EAGER = {"torch_geometric/ChebConv"}
"""Not captured: nonzero(), in a layer with most of the parameters."""


@pytest.mark.filterwarnings("ignore")  # the libraries' own
@pytest.mark.parametrize(("number", "name"), list(enumerate(NAMES)))
def test_a_model_as_it_is_equals_its_own_loop(number: int, name: str) -> None:
    from bench.coverage import case_of
    from bench.coverage_trial import attempt

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        outcome = attempt(case_of(name), [PLANS[number % len(PLANS)]])
    finally:
        torch.set_num_threads(threads)
    assert outcome.captured == (name not in EAGER), outcome.why_not
    assert set(outcome.plans.values()) == {"equal"}, outcome
