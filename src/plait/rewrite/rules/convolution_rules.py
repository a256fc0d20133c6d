"""Rules of convolutions of images, and of their gradients."""

from typing import Any

from plait.rewrite.rules.rule import Rule

_PLAIN: dict[str, tuple[Any, ...]] = {"p": ("1,1",), "y": (0, 1), "z": (0, 1), "d": ("1,1",)}
"""Stride, padding and dilation that a proof tries."""
_LARGER: dict[str, tuple[Any, ...]] = {
    "p": ("1,1", "2,1"), "y": (0, 1), "z": (1,), "d": ("1,1", "2,1"), "k": (0, 2), "l": (0, 1),
}  # fmt: skip
"""The same of a kernel that grows, by `k` rows and `l` columns on each side, as its padding does."""
_GROWS = ("(grows a k l)", '(= d "1,1")')
"""A neighbour is so much larger, and there is nothing between positions."""
_ALIKE = ("(= (size a 2) (size b 2))", "(= (size a 3) (size b 3))")
"""Two kernels have the same rows and columns."""
_TWO_GRADIENTS = {"g": "mohw", "h": "mphw", "x": "mihw", "a": "oicc", "b": "picc"}
"""Shapes of two gradients of one image, which went through two kernels."""

GRADIENTS = (
    Rule(
        name="gradients of one image are summed first",
        given=("(add (add r (convx p y z d g x a)) (convx q u v d h x b))",),
        gives=("(add r (add (convx p y z d g x a) (convx q u v d h x b)))",),
        shapes={"r": "mihw", **_TWO_GRADIENTS},
        numbers={**_PLAIN, "q": ("1,1",), "u": (0, 1), "v": (0, 1)},
        when=("(beside a b)",),
    ),
    Rule(
        name="gradients of one image merge",
        given=("(add (convx p y z d g x a) (convx p y z d h x b))",),
        gives=("(convx p y z d (cat 1 g h) x (cat 0 a b))",),
        shapes=_TWO_GRADIENTS,
        numbers=_PLAIN,
        when=("(next a b)", *_ALIKE),
    ),
    Rule(
        name="gradients of one image merge, from the right",
        given=("(add (convx p y z d g x a) (convx p y z d h x b))",),
        gives=("(convx p y z d (cat 1 h g) x (cat 0 b a))",),
        shapes=_TWO_GRADIENTS,
        numbers=_PLAIN,
        when=("(next b a)", *_ALIKE),
    ),
    Rule(
        name="gradients of kernels on one image merge",
        given=("(convw p y z d g x a)", "(convw p y z d h x b)"),
        gives=(
            "(slice 0 0 (size a 0) (convw p y z d (cat 1 g h) x (cat 0 a b)))",
            "(slice 0 (size a 0) (+ (size a 0) (size b 0)) (convw p y z d (cat 1 g h) x (cat 0 a b)))",
        ),
        shapes=_TWO_GRADIENTS,
        numbers=_PLAIN,
        when=("(next a b)", "(head a)", *_ALIKE),
    ),
    Rule(
        name="gradients of biases merge with those of kernels",
        given=("(convs g)", "(convs h)", "(convw p y z d g x a)", "(convw p y z d h x b)"),
        gives=(
            "(slice 0 0 (size a 0) (convs (cat 1 g h)))",
            "(slice 0 (size a 0) (+ (size a 0) (size b 0)) (convs (cat 1 g h)))",
        ),
        shapes=_TWO_GRADIENTS,
        numbers=_PLAIN,
        when=("(next a b)", "(head a)"),
    ),
    Rule(
        name="the gradient of an image through a larger kernel",
        given=("(convx p y z d g x a)",),
        gives=("(convx p (+ y k) (+ z l) d g x (pad k l a))",),
        shapes={"g": "mojk", "x": "mihw", "a": "oice"},
        numbers=_LARGER,
        when=_GROWS,
    ),
    Rule(
        name="the gradient of a kernel as part of that of a larger one",
        given=("(convw p y z d g x a)",),
        gives=(
            "(slice 3 l (+ l (size a 3)) (slice 2 k (+ k (size a 2)) "
            "(convw p (+ y k) (+ z l) d g x (pad k l a))))",
        ),
        shapes={"g": "mojk", "x": "mihw", "a": "oice"},
        numbers=_LARGER,
        when=_GROWS,
    ),
)
"""Of convolutions' gradients."""

CONVOLUTIONS = (
    Rule(
        name="convolutions of one input merge",
        given=("(conv p y z d x a)", "(conv p y z d x b)"),
        gives=(
            "(slice 1 0 (size a 0) (conv p y z d x (cat 0 a b)))",
            "(slice 1 (size a 0) (+ (size a 0) (size b 0)) (conv p y z d x (cat 0 a b)))",
        ),
        shapes={"x": "mihw", "a": "oicd", "b": "picd"},
        numbers={"p": ("1,1", "2,1"), "y": (1,), "z": (1, 2), "d": ("1,1", "1,2")},
        when=("(next a b)", "(head a)", *_ALIKE),
    ),
    Rule(
        name="convolutions with biases of one input merge",
        given=("(convb p y z d x a r)", "(convb p y z d x b s)"),
        gives=(
            "(slice 1 0 (size a 0) (convb p y z d x (cat 0 a b) (cat 0 r s)))",
            "(slice 1 (size a 0) (+ (size a 0) (size b 0)) (convb p y z d x (cat 0 a b) (cat 0 r s)))",
        ),
        shapes={"x": "mihw", "a": "oicd", "b": "picd", "r": "o", "s": "p"},
        numbers=_PLAIN,
        when=("(next a b)", "(head a)", *_ALIKE),
    ),
    Rule(
        name="a kernel as a larger one",
        given=("(conv p y z d x a)",),
        gives=("(conv p (+ y k) (+ z l) d x (pad k l a))",),
        shapes={"x": "mihw", "a": "oice"},
        numbers=_LARGER,
        when=_GROWS,
    ),
    Rule(
        name="a kernel with biases as a larger one",
        given=("(convb p y z d x a r)",),
        gives=("(convb p (+ y k) (+ z l) d x (pad k l a) r)",),
        shapes={"x": "mihw", "a": "oice", "r": "o"},
        numbers=_LARGER,
        when=_GROWS,
    ),
)
"""Of convolutions."""
