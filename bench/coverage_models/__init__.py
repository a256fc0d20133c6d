"""Models that others wrote, made small by rule: the cases of `bench/coverage.py`.

torchvision cannot even be imported where its compiled library was built for other devices than torch was;
transformers and timm then fail with it. The two ops that it wants to know at import are declared in that case, and
models that call them fail.
"""

import importlib.util
from pathlib import Path

import torch

HAS_VISION_OPS = True
"""Whether torchvision's compiled ops can be called."""

_spec = importlib.util.find_spec("torchvision")
if _spec is not None and _spec.submodule_search_locations:
    try:
        for _library in Path(_spec.submodule_search_locations[0]).glob("_C*.so"):
            torch.ops.load_library(_library)
    except OSError:
        HAS_VISION_OPS = False
        for _name in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )
