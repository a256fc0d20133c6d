"""How fast data is read: a slow dataset with and without workers, and decoded images beside torch's DataLoader.

    python -m bench.data [--samples 400]

Bars: 10 ms a sample with 2 workers is read at least 1.8 times as fast as with none; images that are decoded and
augmented come at least 0.9 times as fast as from torch's DataLoader with as many workers.
"""

import argparse
import io
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from plait.job import Loader, SampleOrder, open_data

WORKERS, BATCH = 2, 8
SLEEP_S = 0.01
"""What a sample of the slow dataset takes."""
SPEEDUP, PACE = 1.8, 0.9
"""The bars."""
SIDE, CROP = 224, 192
"""Pixels of an image, and of what is cut out of it."""


class Slow(Dataset[Tensor]):
    """10 ms a sample."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(SLEEP_S)
        return torch.tensor(index)


class Images(Dataset[Tensor]):
    """JPEG files in memory, decoded, cropped and flipped at random."""

    def __init__(self, samples: int) -> None:
        from PIL import Image

        noise = np.random.default_rng(0)
        self.files = []
        for _ in range(16):
            small = noise.integers(0, 255, (28, 28, 3), dtype=np.uint8)
            file = io.BytesIO()
            Image.fromarray(small).resize((SIDE, SIDE)).save(file, "JPEG")
            self.files.append(file.getvalue())
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        from PIL import Image

        image = np.array(Image.open(io.BytesIO(self.files[index % 16])))
        top, left = (int(at) for at in torch.randint(SIDE - CROP, (2,)))
        cut = torch.from_numpy(image)[top : top + CROP, left : left + CROP].permute(2, 0, 1).float() / 255
        return cut.flip(2) if torch.rand(()) < 0.5 else cut


def by_plait(data: Any, workers: int) -> float:
    """Seconds for one epoch."""
    source = open_data(data)
    order = SampleOrder(num_samples=len(data), batch=BATCH)
    began = time.perf_counter()
    with Loader(source=source, order=order, batch=BATCH, epochs=1, workers=workers) as loader:
        seen = sum(len(share.batch) for step in loader for share in step.micro_batches)
    assert seen == len(data)
    return time.perf_counter() - began


def by_torch(data: Any, workers: int) -> float:
    """Seconds for one epoch."""
    began = time.perf_counter()
    seen = sum(len(batch) for batch in DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=workers))
    assert seen == len(data)
    return time.perf_counter() - began


def best(run: Callable[[], float], times: int = 3) -> float:
    """The least disturbed of a few."""
    return min(run() for _ in range(times))


def main() -> int:
    """Print the two comparisons; 1 where a bar is missed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=400)
    samples = parser.parse_args().samples
    slow = Slow(samples)
    alone, worked = by_plait(slow, 0), best(lambda: by_plait(slow, WORKERS))
    print(f"10 ms a sample: {samples / alone:.0f}/s alone, {samples / worked:.0f}/s by {WORKERS} workers: "
          f"{alone / worked:.2f}x (bar {SPEEDUP})")  # fmt: skip
    images = Images(4 * samples)
    pairs = [
        (by_plait(images, WORKERS), by_torch(images, WORKERS)) for _ in range(4)
    ]  # in turn: both meet the load
    ours, theirs = min(pair[0] for pair in pairs), min(pair[1] for pair in pairs)
    print(f"images: {4 * samples / ours:.0f}/s, torch's DataLoader {4 * samples / theirs:.0f}/s: "
          f"{theirs / ours:.2f}x (bar {PACE})")  # fmt: skip
    return 0 if alone / worked >= SPEEDUP and theirs / ours >= PACE else 1


if __name__ == "__main__":
    sys.exit(main())
