"""Lightning's Trainer on two ranks against itself on one: weights, a logged mean, a checkpoint."""

from pathlib import Path

import pytest
from tests.ranks.own_loops.test_own_loop import close

import plait

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]


def test_a_trainer_on_two_ranks_trains_as_on_one(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning", reason="pip install 'plait[lightning]'")
    from tests.ranks.own_loops.lightning_net import fitted, on_two

    expected = fitted("auto", 1, 6, str(tmp_path / "one"))
    for found in plait.launch(on_two, 2, str(tmp_path / "two")):
        for key in ("weights", "saved"):
            for mine, theirs in zip(found[key], expected[key], strict=True):
                close(mine, theirs)
        assert found["size"] == pytest.approx(expected["size"], rel=1e-6)  # Lightning adds up in float32
