"""Caches of captures, programs and orders keep what was used last, and no more."""

from plait.latest import Latest


def test_the_entry_that_was_not_used_for_the_longest_time_goes() -> None:
    kept = Latest[str, int](2)
    kept.put("a", 1)
    kept.put("b", 2)
    assert kept.get("a") == 1  # "b" is now the older one
    kept.put("c", 3)
    assert (list(kept), len(kept)) == (["a", "c"], 2)
    assert "b" not in kept
    assert kept.get("b") is None


def test_the_same_entry_again_takes_no_room() -> None:
    kept = Latest[str, int](2)
    for number in range(5):
        kept.put("a", number)
    kept.put("b", 9)
    assert (kept.get("a"), kept.get("b")) == (4, 9)
