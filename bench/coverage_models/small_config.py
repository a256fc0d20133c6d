"""Small configs by rule: widths divided, layers few, vocabularies short, all the way down to nested configs.

In: a config class of transformers, a factor. Out: a config of the same class. The rules look at names of fields and
never at the model. Widths are all divided by one factor and numbers of heads are kept, so that what had to divide still
does; equal token ids stay equal.
"""

import re
from typing import Any

from transformers import PretrainedConfig

VOCABULARY = 512
"""Tokens at most."""
POSITIONS = 128
"""Positions at most."""
EXPERTS = 4
"""Experts at most."""
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
"""Token ids that a config may leave open and a loss may need."""

_KEPT = re.compile(
    r"^(_|id2label|label2id|num_labels|torch_dtype|dtype|transformers_version|initializer|layer_norm|rope_theta|"
    r"chunk_size_feed|num_channels|in_channels|in_chans|type_vocab|patch_size|kernel|stride|window|problem_type)|"
    r"(kernel_size|kernel|stride|strides|window_size|padding|dilation|groups|ratio|eps|theta|rate|dropout|scale|std|"
    r"factor|num_channels|num_frames|temporal_patch_size|num_labels|merge_size)$"
)
_LAYERS = re.compile(
    r"((^|_)(n|num|num_hidden|hidden)?_?layers?$|^n_layers?$|_layers$|^depths?$|_depths?$|num_blocks|blocks$|_repeats$|stacks$)"
)
_VOCABULARY = re.compile(r"(vocab_size|vocabulary_size|n_vocab|codebook_size|num_embeddings)$")
_EXPERTS = re.compile(
    r"(num_experts|n_routed_experts|num_local_experts|moe_num_experts|n_experts|num_routed_experts)$"
)
_CHOSEN = re.compile(r"(experts_per_tok|top_k_experts|moe_topk|moe_k|num_selected_experts)$")
_POSITIONS = re.compile(
    r"(max_position|n_positions|max_source_positions|max_target_positions|max_seq|n_ctx|max_2d|max_length)"
)
_TOKEN = re.compile(r"(_token_id|_token_index|_token_ids|_id)$")
_WIDTH = re.compile(
    r"(hidden|d_model|dim|intermediate|ffn|width|channels|embd|embed|inner|d_ff|d_kv|d_inner|rank|state_size|ssm|"
    r"filters|features|mrope_section|size|neck|head_dim|units)"
)
_IMAGE = re.compile(r"(image_size|img_size|crop_size|input_size|spectrogram_size)$")
_HEADS = re.compile(r"heads|groups|n_head|num_key_value")


class Shrinker:
    """One factor, one size of images, blocks at most, and the names that token ids got."""

    def __init__(self, factor: int, image: int, layers: int) -> None:
        self.factor, self.image, self.layers = factor, image, layers
        self.tokens: dict[int, int] = {}

    def config(self, base: PretrainedConfig) -> PretrainedConfig:
        """The small version of a config."""
        made = type(base)(**self.fields(base))
        for name, value in SPECIAL.items():
            if getattr(made, name, None) is None:
                setattr(made, name, value)
        return made

    def fields(self, base: PretrainedConfig) -> dict[str, Any]:
        """The arguments of the small version that differ from the default."""
        layers = next(
            (v for n, v in vars(base).items() if n in ("num_hidden_layers", "num_layers", "n_layer")), None
        )
        kinds = vars(base).get("layer_types")
        few = max(self.layers, len(dict.fromkeys(kinds))) if isinstance(kinds, list) else self.layers
        found: dict[str, Any] = {}
        for name, value in vars(base).items():
            if isinstance(value, PretrainedConfig):
                found[name] = self.fields(value) | {"model_type": value.model_type}
            elif name == "layer_types" and isinstance(value, list):
                distinct = list(dict.fromkeys(value))
                found[name] = (distinct + value)[:few] if len(distinct) < few else distinct
            elif not name.startswith("_") and (changed := self.value(name, value, layers, few)) != value:
                found[name] = changed
        return found

    def value(self, name: str, value: Any, layers: Any, few: int) -> Any:
        """One field."""
        if isinstance(value, bool) or value is None or isinstance(value, (str, float)):
            return value
        if isinstance(value, dict):
            return {k: self.value(k, v, layers, few) if isinstance(k, str) else v for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            if isinstance(layers, int) and len(value) == layers > few:
                value = value[:few]
            return type(value)(self.value(name, entry, layers, few) for entry in value)
        return self.number(name, value, few) if isinstance(value, int) else value

    def number(self, name: str, value: int, few: int) -> int:
        """One number, by the name of its field."""
        if _IMAGE.search(name):
            return min(value, self.image)
        if _KEPT.search(name):
            return value
        for pattern, limit in (
            (_VOCABULARY, VOCABULARY),
            (_EXPERTS, EXPERTS),
            (_CHOSEN, 2),
            (_LAYERS, few),
            (_POSITIONS, POSITIONS),
        ):
            if pattern.search(name):
                return min(value, limit)
        if _TOKEN.search(name):
            if value < VOCABULARY - 64:
                return value
            return self.tokens.setdefault(value, VOCABULARY - 1 - len(self.tokens))
        if _HEADS.search(name) and not name.endswith("dim"):
            return value
        if _WIDTH.search(name) and value > 2 * self.factor and value % self.factor == 0:
            return value // self.factor
        return value
