"""The coverage sweep: small configs by rule, what its table says."""

import json
from pathlib import Path

from bench.coverage import is_wrong, read_cache
from bench.coverage_models.small_config import Shrinker
from bench.coverage_table import counts, misses, table
from transformers import LlamaConfig, SiglipConfig


def test_widths_shrink_together_and_numbers_of_heads_stay() -> None:
    small = Shrinker(16, 32, 2).config(LlamaConfig())
    given = LlamaConfig()
    assert small.num_attention_heads == given.num_attention_heads
    assert small.hidden_size * 16 == given.hidden_size and small.num_hidden_layers == 2
    assert small.hidden_size == small.num_attention_heads * small.head_dim and small.vocab_size == 512


def test_nested_configs_shrink_too() -> None:
    small = Shrinker(16, 32, 2).config(SiglipConfig())
    assert small.text_config.num_hidden_layers == small.vision_config.num_hidden_layers == 2
    assert small.vision_config.image_size == 32 and small.text_config.hidden_size == 48


def test_table_counts_and_names_every_miss(tmp_path: Path) -> None:
    fine = dict.fromkeys(("single", "ddp", "zero3", "megatron", "1f1b"), "equal")
    lines = [
        {"name": "transformers/a", "captured": True, "why_not": "", "plans": fine},
        {"name": "transformers/b", "captured": True, "why_not": "", "plans": fine | {"ddp": "failed: KeyError: x"}},
        {"name": "transformers/c", "unbuildable": "C: no labels"},
        {"name": "timm/d", "broken": "longer than 120 s"},
    ]  # fmt: skip
    path = tmp_path / "cache.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = list(read_cache(path).values())
    assert counts([line for line in found if "plans" in line])["ddp"] == 1
    assert "| transformers | 3 | 2 | 2 | 2 (100%) | 2 (100%) | 1 (50%) |" in table(found)
    assert "| transformers/b | failed | ddp | KeyError: x |" in misses(found) and "timm/d" in misses(found)
    assert [is_wrong(line) for line in found] == [False, True, False, False]
