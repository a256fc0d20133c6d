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
    fragmentation: float = 0.02
    """Share of activations and buffers that the allocator holds beside what is used: set, not fitted."""


AMPERE = Calibration(
    matmul_share=0.84,
    matmul_tiles=26.0,
    matmul_depth=70.0,
    attention_share=0.31,
    memory_share=0.58,
    kernel_s=1.4e-6,
    host_s=4.1e-5,
    link_share=0.88,
    step_s=1.2e-2,
    reserve_bytes=2e9,
)
"""A100, from the runs of vTrain, MPT, Korthikanti et al. and Narayanan et al.; V100 and K80 take them too."""
HOPPER = Calibration(
    matmul_share=0.6,
    matmul_tiles=50.0,
    matmul_depth=50.0,
    attention_share=0.48,
    memory_share=0.74,
    kernel_s=6.3e-6,
    host_s=5.8e-5,
    link_share=0.85,
    step_s=1.1e-2,
    reserve_bytes=2e9,
)
"""H100, from the runs of the Hugging Face sweep; H200 and B200 take them too."""
