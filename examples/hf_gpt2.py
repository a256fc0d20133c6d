"""Hugging Face's GPT-2, small and from scratch, on the bytes of the New Testament.

    plait run examples/hf_gpt2.py --plan ddp --ranks 2
    python examples/hf_gpt2.py

The model is transformers' own, unedited, built from a config; nothing is downloaded. Needs `pip install transformers`.
Held-out loss falls to about 1.9 nats a byte; knowing only how frequent each byte is gives 3.01.
"""

import gzip
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import plait

DATA = Path(__file__).parent / "data" / "new_testament.txt.gz"
LENGTH = 64


def text(*, held_out: bool = False) -> list[dict[str, Tensor]]:
    """Windows of the text as bytes, in the form that transformers takes; the last tenth is held out."""
    codes = torch.tensor(list(gzip.decompress(DATA.read_bytes())))
    split = len(codes) * 9 // 10
    windows = (codes[split:] if held_out else codes[:split]).unfold(0, LENGTH, LENGTH)
    return [{"input_ids": window, "labels": window} for window in windows]


def gpt2() -> nn.Module:
    shape = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": 96, "n_layer": 3, "n_head": 4}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    return GPT2LMHeadModel(GPT2Config(**shape, **quiet, bos_token_id=0, eos_token_id=0))


def next_byte(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def job() -> plait.Job:
    return plait.Job(
        model=gpt2,
        data=text,
        objective=next_byte,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1),
        schedule=lambda step: 3e-3 * min((step + 1) / 40, 1.0),
        clip_norm=1.0,
        batch=32,
        steps=300,
        evaluate=lambda: text(held_out=True),
        evaluate_every=150,
    )


if __name__ == "__main__":
    result = plait.train(job(), plan="ddp", ranks=2)
    model = gpt2()
    model.load_state_dict(result.weights)
    held_out = torch.stack([window["input_ids"] for window in text(held_out=True)[:256]])
    with torch.no_grad():
        loss = next_byte(model, {"input_ids": held_out, "labels": held_out}).item()
    print(f"held-out loss: {loss:.3f} nats a byte, from {result.losses[0]:.3f}")
