"""BERT-large on 1, 2, 4 and 8 K80, lecture 000: predicted, and an inverse search for what its numbers can mean.

python -m examples.lectures.lecture000_bert_on_k80
"""

from dataclasses import dataclass, replace
from itertools import product

from examples.lectures.exhibit import Exhibit, Number, Table, show
from examples.lectures.pictures import curves

import plait
from plait.cluster.cluster import Cluster
from plait.cluster.parse import parse_cluster
from plait.search.choose.subject import subject_of_paper
from plait.search.predict.sketch import Sketcher

GPUS = (1, 2, 4, 8)
MINUTES = (399.0, 214.0, 118.0, 61.0)
EFFICIENCY = (1.0, 0.93, 0.85, 0.82)
"""As the lecture prints them."""
LINKS = {
    "10 GB/s, PCIe 3": 10e9,
    "5 GB/s, shared by pairs": 5e9,
    "3 GB/s, through the host": 3e9,
    "1.25 GB/s, 10 Gbit": 1.25e9,
}
"""Between GPUs, bytes a second."""
BATCHES, SEQUENCES = (2, 4, 8, 16, 32), (128, 256, 384, 512)
"""Samples a GPU, tokens a sample."""
CLOSE = 0.03
"""Of efficiency, the worst of the three numbers: about what rounding to minutes and a noisy machine allow."""


@dataclass(frozen=True, kw_only=True)
class Guess:
    """One setting, and the efficiencies that are predicted for it."""

    batch: int
    seq: int
    link: str
    overlap: bool
    efficiency: tuple[float, ...]
    samples_per_s: float
    """Of one GPU."""

    @property
    def error(self) -> float:
        return max(abs(a - b) for a, b in zip(self.efficiency, EFFICIENCY, strict=True))


def _cluster(bandwidth: float) -> Cluster:
    found = parse_cluster("8xK80")
    return replace(
        found, pair=replace(found.pair, bandwidth=bandwidth), host=replace(found.host, bandwidth=bandwidth)
    )


def guesses() -> list[Guess]:
    """Every setting that fits a K80's memory, the best first."""
    found = []
    for seq, (link, bandwidth) in product(SEQUENCES, LINKS.items()):
        subject = subject_of_paper(f"bert-large:seq={seq}", batch=8)
        sketcher = Sketcher(subject.costs(tensor=1, sequence=False), _cluster(bandwidth), subject.state)
        for batch, overlap in product(BATCHES, (True, False)):
            plans = [plait.resolve("ddp", gpus, {"sync": {"overlap": overlap}}) for gpus in GPUS]
            made = [
                sketcher.predict(plan, micro_batch=batch, batch=batch * n)
                for plan, n in zip(plans, GPUS, strict=True)
            ]
            if all(one.fits for one in made):
                rates = [one.samples_per_s for one in made]
                shares = tuple(rate / n / rates[0] for rate, n in zip(rates, GPUS, strict=True))
                found.append(
                    Guess(
                        batch=batch,
                        seq=seq,
                        link=link,
                        overlap=overlap,
                        efficiency=shares,
                        samples_per_s=rates[0],
                    )
                )
    return sorted(found, key=lambda guess: guess.error)


def exhibit() -> Exhibit:
    found = guesses()
    best, close = found[0], [guess for guess in found if guess.error <= CLOSE]
    minutes = [MINUTES[0] / (n * share) for n, share in zip(GPUS, best.efficiency, strict=True)]
    plain = next(g for g in found if g.link.startswith("10 GB/s") and g.overlap and g.seq == 512)
    printed = [MINUTES[0] / n / m for n, m in zip(GPUS, MINUTES, strict=True)]
    return Exhibit(
        lecture="000",
        title="BERT-large on one to eight K80: what the numbers can mean",
        idea="The lecture measures 399, 214, 118 and 61 minutes on 1, 2, 4 and 8 K80 and does not say "
        "with which batch, sequence, link or overlap. plait predicts a step on that board for every "
        "combination and lists those whose scaling is the lecture's.",
        numbers=[
            *(
                Number(
                    what=f"minutes on {n}, in the best setting",
                    lecture=m,
                    ours=ours,
                    note="as given" if n == 1 else "",
                )
                for n, m, ours in zip(GPUS, MINUTES, minutes, strict=True)
            ),
            *(
                Number(
                    what=f"efficiency on {n}",
                    lecture=share,
                    ours=ours,
                    note=f"399 / {n} / {m:.0f} is {own:.3f}",
                )
                for n, m, share, ours, own in zip(
                    GPUS, MINUTES, EFFICIENCY, best.efficiency, printed, strict=True
                )
                if n > 1
            ),
            Number(what="settings tried that fit 12 GB", ours=float(len(found))),
            Number(what=f"within {CLOSE} of all three efficiencies", ours=float(len(close))),
        ],
        tables=[
            Table(
                title="The settings that are nearest",
                columns=[
                    "samples a GPU",
                    "tokens",
                    "link",
                    "overlap",
                    "2",
                    "4",
                    "8",
                    "worst error",
                    "samples/s on 1",
                ],
                rows=[
                    [
                        g.batch,
                        g.seq,
                        g.link,
                        "yes" if g.overlap else "no",
                        *(f"{e:.2f}" for e in g.efficiency[1:]),
                        f"{g.error:.3f}",
                        f"{g.samples_per_s:.2f}",
                    ]
                    for g in found[:12]
                ],
            )
        ],
        pictures={
            "Efficiency over the number of GPUs": curves(
                "efficiency",
                {
                    "lecture": list(zip(map(float, GPUS), EFFICIENCY, strict=True)),
                    "nearest setting": list(zip(map(float, GPUS), best.efficiency, strict=True)),
                    "10 GB/s with overlap, 512 tokens": list(
                        zip(map(float, GPUS), plain.efficiency, strict=True)
                    ),
                },
                x="K80",
                y="per-GPU efficiency",
                log_x=True,
            )
        },
        seen="The numbers are those of a link that cannot hide the gradients: 1.3 GB of them a step. "
        "With gradients reduced while the backward runs over a fast link, eight K80 would lose next to "
        "nothing. (A K80 board has two GPUs; 'one' is taken as one of them. Absolute minutes depend on "
        "how much data was read, which is not said, so the first is taken as given.)",
    )


if __name__ == "__main__":
    show(exhibit())
