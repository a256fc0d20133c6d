"""A chosen plan as the configuration of another system: one file a system."""

from collections.abc import Mapping
from types import MappingProxyType

from plait.search.export.accelerate import ACCELERATE
from plait.search.export.base import Exported, Exporter, Setup
from plait.search.export.deepspeed import DEEPSPEED
from plait.search.export.fsdp2 import FSDP2
from plait.search.export.megatron import MEGATRON
from plait.search.export.torchtitan import TORCHTITAN

__all__ = ["EXPORTERS", "Exported", "Exporter", "Setup"]

EXPORTERS: Mapping[str, Exporter] = MappingProxyType(
    {exporter.name: exporter for exporter in (FSDP2, MEGATRON, TORCHTITAN, DEEPSPEED, ACCELERATE)}
)
"""By the name that `--export` takes."""
