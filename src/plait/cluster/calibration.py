"""How far a type of device stays below its data sheet: a few constants, the same for every model and plan.

In: nothing. Out: a `Calibration`. What each constant multiplies is written in docs/cost-model.md; `bench/calibrate.py`
fits nine of them on published measurements, or `plait measure` on a machine; the two of memory are set.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Constants of one type of device."""

    matmul_share: float = 0.85
    """Share of the peak that large matrix products reach."""
    matmul_tiles: float = 50.0
    """Tiles of the result at which half of the processors are busy."""
    matmul_depth: float = 100.0
    """Length of the summed dim at which a matrix product reaches half of that: filling and draining the pipeline."""
    attention_share: float = 0.5
    """Share of the peak that fused attention reaches."""
    memory_share: float = 0.8
    """Share of the memory's bandwidth that ops without matrix products reach."""
    kernel_s: float = 4e-6
    """Time that every kernel takes beside its work."""
    host_s: float = 1.2e-5
    """Time that the host needs to start one op; the device waits where its work is shorter."""
    link_share: float = 0.75
    """Share of a link's bandwidth that collectives reach."""
    step_s: float = 5e-3
    """Time of a step in which no device works: data, learning rate, logging."""
    reserve_bytes: float = 1.5e9
    """Memory of the device's context and of communication: set, not fitted."""
    fragmentation: float = 0.03
    """Share of activations and buffers that the allocator holds beside what is used: set, not fitted."""


AMPERE = Calibration(
    matmul_share=0.8376,
    matmul_tiles=27.1,
    matmul_depth=71.6,
    attention_share=0.3077,
    memory_share=0.573,
    kernel_s=1.26e-6,
    host_s=4.19e-5,
    link_share=0.85,
    step_s=1.31e-2,
)
"""A100, from the runs of vTrain, MPT, Korthikanti et al. and Narayanan et al.; V100 and K80 take them too."""
HOPPER = Calibration(
    matmul_share=0.583,
    matmul_tiles=47.5,
    matmul_depth=48.4,
    attention_share=0.525,
    memory_share=0.692,
    kernel_s=6.39e-6,
    host_s=5.97e-5,
    link_share=0.85,
    step_s=1.08e-2,
)
"""H100, from the runs of the Hugging Face sweep; H200 and B200 take them too."""
