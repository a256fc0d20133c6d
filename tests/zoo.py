"""Tiny models with data and a loss: every kind of network and objective that plait must train exactly.

In: a name in `ZOO`. Out: a `Case`; its `job(...)` is a `Job` that takes milliseconds a step.
Nothing is downloaded, nothing starts a process, and there is no dropout except where the case says so.
One file, so that the command line and workers can load it by its path.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from plait.job.job import Job

VOCAB, LENGTH, WIDTH, HEADS = 32, 8, 32, 4

OPTIMIZERS: Mapping[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model, its data and what is minimised; exactly one of `loss` and `objective` is given."""

    model: Callable[[], nn.Module]
    """Builds the network from torch's global generator."""
    samples: Callable[[int, int], Any]
    """(n, seed) -> a batch of n samples: a tuple or dict of tensors whose first dim is n."""
    loss: Callable[..., Tensor] | None = None
    """(output, target) -> scalar."""
    objective: Callable[..., Any] | None = None
    """(model, batch) -> scalar, or (total, weight)."""
    dropout: bool = False
    """Draws random numbers in the forward."""
    batch_statistics: bool = False
    """Has BatchNorm: samples of a micro-batch meet in the forward, and buffers change."""
    ragged: bool = False
    """The loss divides by a weight that differs from sample to sample."""
    capturable: bool = True
    """False where Python control flow depends on the data."""
    separable: bool = True
    """False where the loss is no weighted mean over samples, so shares of the batch do not add up to it."""
    float32_inside: bool = False
    """Casts to float32 whatever the dtype of the weights: float64 runs agree only as well as float32."""
    notes: str = ""
    """What this case is for, where the name does not say it."""

    def job(
        self,
        batch: int = 8,
        steps: int = 3,
        *,
        optimizer: str = "sgd",
        num_samples: int = 0,
        **overrides: Any,
    ) -> Job:
        """A Job over `num_samples` samples (0: enough for `steps` steps, so that none repeats)."""
        data = unstack(self.samples(num_samples or batch * steps, 1234))
        given: dict[str, Any] = {
            "model": self.model,
            "data": data,
            "loss": self.loss,
            "objective": self.objective,
            "optimizer": OPTIMIZERS[optimizer],
            "batch": batch,
            "steps": steps,
        }
        return Job(**(given | overrides))


def unstack(batch: Any) -> list[Any]:
    """The samples of a batch, each with the batch's own structure."""
    leaves, spec = tree_flatten(batch)
    return [tree_unflatten(list(parts), spec) for parts in zip(*leaves, strict=True)]


# --- data: every function is (n, seed) -> batch -------------------------------------------------------------


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def vectors(n: int, seed: int) -> tuple[Tensor, Tensor]:
    g = _generator(seed)
    return torch.randn(n, 16, generator=g), torch.randint(0, 10, (n,), generator=g)


def regression(n: int, seed: int) -> tuple[Tensor, Tensor]:
    g = _generator(seed)
    return torch.randn(n, 16, generator=g), torch.randn(n, 1, generator=g)


def multi_label(n: int, seed: int) -> tuple[Tensor, Tensor]:
    g = _generator(seed)
    return torch.randn(n, 16, generator=g), torch.randint(0, 2, (n, 10), generator=g).float()


def images(n: int, seed: int) -> tuple[Tensor, Tensor]:
    g = _generator(seed)
    return torch.randn(n, 3, 16, 16, generator=g), torch.randint(0, 10, (n,), generator=g)


def image_pairs(n: int, seed: int) -> tuple[Tensor, Tensor]:
    g = _generator(seed)
    return torch.randn(n, 1, 16, 16, generator=g), torch.randn(n, 1, 16, 16, generator=g)


def two_views(n: int, seed: int) -> dict[str, Tensor]:
    g = _generator(seed)
    left = torch.randn(n, 16, generator=g)
    return {"left": left, "right": left + 0.1 * torch.randn(n, 16, generator=g)}


def tokens(n: int, seed: int) -> tuple[Tensor, Tensor]:
    text = torch.randint(0, VOCAB, (n, LENGTH + 1), generator=_generator(seed))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def sequences(n: int, seed: int) -> tuple[Tensor, Tensor]:
    g = _generator(seed)
    return torch.randint(0, VOCAB, (n, LENGTH), generator=g), torch.randint(0, 10, (n,), generator=g)


def _lengths(n: int, g: torch.Generator) -> Tensor:
    """Between 1 and LENGTH real tokens a sample, as an (n, LENGTH) mask."""
    return torch.arange(LENGTH) < torch.randint(1, LENGTH + 1, (n, 1), generator=g)


def masked_tokens(n: int, seed: int) -> dict[str, Tensor]:
    inputs, targets = tokens(n, seed)
    return {"inputs": inputs, "targets": targets, "mask": _lengths(n, _generator(seed + 1))}


def ignored_tokens(n: int, seed: int) -> tuple[Tensor, Tensor]:
    inputs, targets = tokens(n, seed)
    return inputs, targets.masked_fill(~_lengths(n, _generator(seed + 1)), -100)


def language(n: int, seed: int) -> dict[str, Tensor]:
    inputs, _ = tokens(n, seed)
    return {"input_ids": inputs, "labels": inputs.clone()}


def masked_language(n: int, seed: int) -> dict[str, Tensor]:
    g = _generator(seed)
    labels = torch.randint(0, VOCAB, (n, LENGTH), generator=g)
    real = _lengths(n, g)
    hidden = (torch.rand(n, LENGTH, generator=g) < 0.3) & real
    hidden[:, 0] = True
    return {
        "input_ids": labels.masked_fill(hidden, 0),
        "attention_mask": real.long(),
        "labels": labels.masked_fill(~hidden, -100),
    }


def graphs(n: int, seed: int) -> dict[str, Tensor]:
    """Undirected graphs of LENGTH nodes as dense adjacency, every node its own neighbour, and a class for each node."""
    g = _generator(seed)
    edges = (torch.rand(n, LENGTH, LENGTH, generator=g) < 0.3).float().triu(1)
    return {
        "nodes": torch.randn(n, LENGTH, 16, generator=g),
        "adjacency": edges + edges.mT + torch.eye(LENGTH),
        "classes": torch.randint(0, 4, (n, LENGTH), generator=g),
    }


def pixels(n: int, seed: int) -> dict[str, Tensor]:
    x, y = images(n, seed)
    return {"pixel_values": x, "labels": y}


# --- models -------------------------------------------------------------------------------------------------


def linear() -> nn.Module:
    return nn.Linear(16, 1)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10))


def alexnet() -> nn.Module:
    """Five convolutions, three poolings, three dense layers behind dropout, as in Krizhevsky et al. 2012."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(12, 16, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.5), nn.Linear(48, 32), nn.ReLU()),
        *(nn.Dropout(0.5), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)),
    )


class BasicBlock(nn.Module):
    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(num_out)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(num_out)
        self.skip = nn.Sequential()
        if stride != 1 or num_in != num_out:
            self.skip = nn.Sequential(
                nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = self.norm2(self.conv2(y))
        y += self.skip(x)
        return F.relu(y, inplace=True)


def resnet() -> nn.Module:
    """ResNet-18's eight basic blocks, 4 channels wide at the stem."""
    widths = (4, 4, 4, 8, 8, 16, 16, 32, 32)
    blocks = [BasicBlock(a, b, 2 if a != b else 1) for a, b in pairwise(widths)]
    stem = (nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


class UNet(nn.Module):
    """Two levels down and up; each level's features skip across the whole network."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up2, self.up1 = nn.ConvTranspose2d(8, 8, 2, 2), nn.ConvTranspose2d(8, 4, 2, 2)
        self.merge2, self.merge1 = nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)
        self.head = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.down1(x))
        b = F.relu(self.down2(F.max_pool2d(a, 2)))
        c = F.relu(self.middle(F.max_pool2d(b, 2)))
        d = F.relu(self.merge2(torch.cat([self.up2(c), b], 1)))
        return self.head(F.relu(self.merge1(torch.cat([self.up1(d), a], 1))))


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(x))[0])


class Attention(nn.Module):
    """Causal attention with fused QKV and the head count written into the view."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv, self.out, self.dropout = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), dropout

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        q, k, v = (t.view(n, length, 4, 8).transpose(1, 2) for t in self.qkv(x).split(WIDTH, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = self.out(y.transpose(1, 2).reshape(n, length, WIDTH))
        return F.dropout(y, self.dropout, self.training)


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(WIDTH), Attention(dropout), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, *, tied: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(dropout), Block(dropout))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            nn.init.normal_(self.tokens.weight, std=0.1)
            self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(h)))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x)).mean(1))


class GraphNetwork(nn.Module):
    """Message passing on dense adjacency: the mean of the neighbours' messages updates each node."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, WIDTH)
        self.messages = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.updates = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        h = torch.tanh(self.embed(nodes))
        degree = adjacency.sum(-1, keepdim=True)
        for message, update in zip(self.messages, self.updates, strict=True):
            heard = adjacency @ F.relu(message(h)) / degree
            h = h + torch.tanh(update(torch.cat([h, heard], -1)))
        return self.head(h)


class DenseMixture(nn.Module):
    """Every expert sees every token; a softmax over experts weighs what they answer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gate = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        weights = self.gate(h).softmax(-1)
        answers = torch.stack([expert(h) for expert in self.experts], -1)
        return self.head(h + (answers * weights.unsqueeze(-2)).sum(-1))


class CapacityMixture(nn.Module):
    """Each token goes to its two best experts, which take only so many of the batch's tokens; the rest are dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gate = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, 4, bias=False)
        self.inner = nn.Parameter(torch.randn(4, WIDTH, 2 * WIDTH) * WIDTH**-0.5)
        self.outer = nn.Parameter(torch.randn(4, 2 * WIDTH, WIDTH) * WIDTH**-0.5)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.embed(x)
        tokens = h.flatten(0, 1)
        gates = self.gate(tokens).softmax(-1)
        best, chosen = gates.topk(2, dim=-1)
        capacity = max(1, tokens.shape[0] // 3)
        taken = F.one_hot(chosen, 4).to(h.dtype)  # [token, choice, expert]
        order = taken.transpose(0, 1).reshape(-1, 4).cumsum(0).reshape(2, -1, 4).transpose(0, 1) * taken - 1
        kept = taken * (order < capacity)
        seats = F.one_hot(order.clamp(0, capacity - 1).long(), capacity).to(h.dtype)
        combine = torch.einsum("tk,tke,tkec->tec", best / best.sum(-1, keepdim=True), kept, seats)
        inside = torch.einsum("tec,td->ecd", (combine > 0).to(h.dtype), tokens)
        answers = F.relu(torch.einsum("ecd,edh->ech", inside, self.inner)) @ self.outer
        mixed = torch.einsum("tec,ecd->td", combine, answers).view_as(h)
        load = 4 * (taken[:, 0].mean(0) * gates.mean(0)).sum()
        return self.head(h + mixed), load


class Branching(nn.Module):
    """Passes each sample through the hidden layer as often as the sample itself asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(16, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        rows = []
        for row in x:
            for _ in range(1 + int(row[0].item() > 0)):
                row = torch.tanh(self.hidden(row))
            rows.append(row)
        return self.head(torch.stack(rows))


class UnusedParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.forgotten = nn.Linear(16, 10), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def hf_gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=LENGTH, n_embd=WIDTH, n_layer=2, n_head=HEADS, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def hf_llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=2,
        num_attention_heads=HEADS, num_key_value_heads=2, max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def hf_bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS,
        intermediate_size=2 * WIDTH, max_position_embeddings=LENGTH, use_cache=False,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def hf_vit() -> nn.Module:
    config = transformers.ViTConfig(
        image_size=16, patch_size=8, num_channels=3, hidden_size=WIDTH, num_hidden_layers=2,
        num_attention_heads=HEADS, intermediate_size=2 * WIDTH,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    config.num_labels = 10
    return transformers.ViTForImageClassification(config)


def hf_t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=WIDTH, d_kv=8, d_ff=2 * WIDTH, num_layers=2, num_heads=HEADS,
        dropout_rate=0.0, use_cache=False, pad_token_id=0,
    )  # fmt: skip
    config.decoder_start_token_id = 0
    return transformers.T5ForConditionalGeneration(config)


# --- losses and objectives ----------------------------------------------------------------------------------


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def hf_objective(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def masked_objective(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    losses = F.cross_entropy(model(batch["inputs"]).transpose(1, 2), batch["targets"], reduction="none")
    return (losses * batch["mask"]).sum(), batch["mask"].sum()


def graph_objective(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    output = model(batch["nodes"], batch["adjacency"])
    return F.cross_entropy(output.transpose(1, 2), batch["classes"])


def balanced_objective(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of tokens, and a little of how unevenly experts are used."""
    output, load = model(batch[0])
    return token_loss(output, batch[1]) + 0.01 * load


def contrastive_objective(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """InfoNCE: each left view must find its own right view among all of the batch's."""
    left, right = F.normalize(model(batch["left"]), dim=1), F.normalize(model(batch["right"]), dim=1)
    scores = left @ right.T / 0.2
    return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


_CLASSES = nn.CrossEntropyLoss()
_RARE_CLASSES_COUNT_MORE = nn.CrossEntropyLoss(weight=torch.linspace(0.2, 2.0, 10))
_HF: dict[str, Any] = {"samples": language, "objective": hf_objective}

ZOO: Mapping[str, Case] = {
    "linear": Case(model=linear, samples=regression, loss=nn.MSELoss()),
    "mlp": Case(model=mlp, samples=vectors, loss=_CLASSES),
    "alexnet": Case(model=alexnet, samples=images, loss=_CLASSES, dropout=True),
    "resnet_bn": Case(model=resnet, samples=images, loss=_CLASSES, batch_statistics=True),
    "lstm": Case(model=LSTM, samples=tokens, loss=token_loss),
    "gpt": Case(model=GPT, samples=tokens, loss=token_loss, notes="fused QKV, heads in the view"),
    "gpt_tied": Case(model=lambda: GPT(tied=True), samples=tokens, loss=token_loss),
    "gpt_dropout": Case(model=lambda: GPT(dropout=0.2), samples=tokens, loss=token_loss, dropout=True),
    "hf_gpt2": Case(model=hf_gpt2, **_HF, float32_inside=True, notes="Conv1D, tied head"),
    "hf_llama": Case(model=hf_llama, **_HF, float32_inside=True, notes="grouped-query attention, rotary"),
    "hf_bert": Case(model=hf_bert, samples=masked_language, objective=hf_objective, ragged=True),
    "hf_vit": Case(model=hf_vit, samples=pixels, objective=hf_objective),
    "hf_t5": Case(model=hf_t5, **_HF, float32_inside=True, notes="encoder and decoder, shared positions"),
    "unet": Case(model=UNet, samples=image_pairs, loss=nn.MSELoss(), notes="long skips"),
    "encoder": Case(model=Encoder, samples=sequences, loss=_CLASSES, notes="torch's own encoder layers"),
    "graph_network": Case(model=GraphNetwork, samples=graphs, objective=graph_objective),
    "moe_dense": Case(model=DenseMixture, samples=tokens, loss=token_loss),
    "moe_capacity": Case(
        model=CapacityMixture,
        samples=tokens,
        objective=balanced_objective,
        separable=False,
        notes="tokens of the whole batch compete for places",
    ),
    "masked_gpt": Case(model=GPT, samples=masked_tokens, objective=masked_objective, ragged=True),
    "ignore_index": Case(model=GPT, samples=ignored_tokens, loss=token_loss, ragged=True),
    "class_weights": Case(model=mlp, samples=vectors, loss=_RARE_CLASSES_COUNT_MORE, ragged=True),
    "label_smoothing": Case(model=mlp, samples=vectors, loss=nn.CrossEntropyLoss(label_smoothing=0.1)),
    "mse": Case(model=mlp, samples=multi_label, loss=nn.MSELoss()),
    "bce": Case(model=mlp, samples=multi_label, loss=nn.BCEWithLogitsLoss()),
    "contrastive": Case(model=mlp, samples=two_views, objective=contrastive_objective, separable=False),
    "branching": Case(model=Branching, samples=vectors, loss=_CLASSES, capturable=False),
    "unused_parameter": Case(model=UnusedParameter, samples=vectors, loss=_CLASSES),
}
