"""Every rule holds in all cases that are tried; rules that are not true are caught."""

import pytest
from tests.unit.rewrite.counterexamples import counterexample

from plait.rewrite.rules.equations import RULES
from plait.rewrite.rules.rule import Rule


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_holds(rule: Rule) -> None:
    assert counterexample(rule) is None


WRONG = (
    Rule(name="products commute", given=("(mm a b)",), gives=("(mm b a)",), shapes={"a": "nn", "b": "nn"}),
    Rule(
        name="merged, and the parts confused",
        given=("(mm x a)", "(mm x b)"),
        gives=(
            "(slice 1 (size a 1) (+ (size a 1) (size b 1)) (mm x (cat 1 a b)))",
            "(slice 1 0 (size a 1) (mm x (cat 1 a b)))",
        ),
        shapes={"x": "mk", "a": "kn", "b": "kn"},
    ),
    Rule(
        name="a sum of products, crossed",
        given=("(add (mm a b) (mm c d))",),
        gives=("(mm (cat 1 a c) (cat 0 d b))",),
        shapes={"a": "mk", "b": "kn", "c": "mk", "d": "kn"},
    ),
    Rule(
        name="a part of a part, counted from the wrong end",
        given=("(slice d s e (slice d u v a))",),
        gives=("(slice d s e a)",),
        shapes={"a": "mn"},
        numbers={"d": (0, 1), "s": (0, 1), "e": (1, 2), "u": (0, 1), "v": (3,)},
        when=("(>= (- v u) e)",),
    ),
    Rule(
        name="in another order twice, the wrong one first",
        given=("(perm q (perm p a))",),
        gives=("(perm r a)",),
        shapes={"a": "lmn"},
        numbers={"p": ("0,2,1", "2,0,1"), "q": ("0,2,1", "2,0,1")},
        when=("(then q p r)",),
    ),
    Rule(
        name="a part in another order, of the same dim",
        given=("(slice d s e (perm p a))",),
        gives=("(perm p (slice d s e a))",),
        shapes={"a": "lmn"},
        numbers={"p": ("0,2,1", "2,0,1"), "d": (0, 1, 2), "s": (0, 1), "e": (1, 2)},
    ),
    Rule(
        name="a kernel as a larger one, whatever lies between its positions",
        given=("(conv p y z d x a)",),
        gives=("(conv p (+ y k) (+ z l) d x (pad k l a))",),
        shapes={"x": "mihw", "a": "oice"},
        numbers={"p": ("1,1",), "y": (1,), "z": (1,), "d": ("2,2",), "k": (1,), "l": (1,)},
    ),
    Rule(
        name="a kernel as a larger one, on one side alone",
        given=("(conv p y z d x a)",),
        gives=("(conv p (+ y k) z d x (pad k k a))",),
        shapes={"x": "mihw", "a": "oice"},
        numbers={"p": ("1,1",), "y": (1,), "z": (1,), "d": ("1,1",), "k": (1,)},
    ),
    Rule(
        name="a view of another shape",
        given=("(view s a)",),
        gives=("a",),
        shapes={"a": "mn"},
        numbers={"s": ("2,3", "3,2")},
    ),
    Rule(
        name="applies to nothing",
        given=("(slice 0 2 1 a)",),
        gives=("a",),
        shapes={"a": "mn"},
    ),
)


@pytest.mark.parametrize("rule", WRONG, ids=lambda rule: rule.name)
def test_a_rule_that_is_not_true_is_caught(rule: Rule) -> None:
    assert counterexample(rule) is not None
