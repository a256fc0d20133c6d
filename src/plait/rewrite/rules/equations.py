"""The rules: equations between ops of aten, each held to be true by its proof (`proof.py`) and nothing else.

`(next a b)` says that `b` follows `a` among tensors that may lie side by side: it keeps merges to runs of neighbours,
of which there are few, where subsets would be many; `(beside a b)` that one of the two follows the other; `(head a)`
that a run begins there. `(weight a)` says that `a` is made of parameters alone: sums of those are taken apart, sums
along the way of the data are not.
"""

from plait.rewrite.rules.convolution_rules import CONVOLUTIONS, GRADIENTS
from plait.rewrite.rules.rule import Rule
from plait.rewrite.rules.shape_rules import ELEMENTWISE, ORDERS, SHAPES

PRODUCTS = (
    Rule(
        name="products associate to the right",
        given=("(mm (mm a b) c)",),
        gives=("(mm a (mm b c))",),
        shapes={"a": "mk", "b": "kl", "c": "ln"},
    ),
    Rule(
        name="products associate to the left",
        given=("(mm a (mm b c))",),
        gives=("(mm (mm a b) c)",),
        shapes={"a": "mk", "b": "kl", "c": "ln"},
    ),
    Rule(
        name="products of one input merge",
        given=("(mm x a)", "(mm x b)"),
        gives=(
            "(slice 1 0 (size a 1) (mm x (cat 1 a b)))",
            "(slice 1 (size a 1) (+ (size a 1) (size b 1)) (mm x (cat 1 a b)))",
        ),
        shapes={"x": "mk", "a": "kn", "b": "kp"},
        when=(
            "(next a b)",
            "(head a)",
        ),
    ),
    Rule(
        name="products with one input merge",
        given=("(mm a x)", "(mm b x)"),
        gives=(
            "(slice 0 0 (size a 0) (mm (cat 0 a b) x))",
            "(slice 0 (size a 0) (+ (size a 0) (size b 0)) (mm (cat 0 a b) x))",
        ),
        shapes={"x": "km", "a": "nk", "b": "pk"},
        when=(
            "(next a b)",
            "(head a)",
        ),
    ),
    Rule(
        name="linear layers of one input merge",
        given=("(addmm p x a)", "(addmm q x b)"),
        gives=(
            "(slice 1 0 (size a 1) (addmm (cat 0 p q) x (cat 1 a b)))",
            "(slice 1 (size a 1) (+ (size a 1) (size b 1)) (addmm (cat 0 p q) x (cat 1 a b)))",
        ),
        shapes={"x": "mk", "a": "kn", "b": "kp", "p": "n", "q": "p"},
        when=(
            "(next a b)",
            "(head a)",
            "(= 1 (vec-length (shape p)))",
            "(= 1 (vec-length (shape q)))",
            "(= (size p 0) (size a 1))",
            "(= (size q 0) (size b 1))",
        ),
    ),
    Rule(
        name="a sum of products is a product",
        given=("(add (mm a b) (mm c d))",),
        gives=("(mm (cat 1 a c) (cat 0 b d))",),
        shapes={"a": "mk", "b": "kn", "c": "ml", "d": "ln"},
        when=("(next b d)",),
    ),
    Rule(
        name="a sum of products is a product, from the right",
        given=("(add (mm a b) (mm c d))",),
        gives=("(mm (cat 1 c a) (cat 0 d b))",),
        shapes={"a": "mk", "b": "kn", "c": "ml", "d": "ln"},
        when=("(next d b)",),
    ),
    Rule(
        name="products after another summand are summed first",
        given=("(add (add r (mm a b)) (mm c d))",),
        gives=("(add r (add (mm a b) (mm c d)))",),
        shapes={"r": "mn", "a": "mk", "b": "kn", "c": "ml", "d": "ln"},
        when=("(beside b d)",),
    ),
    Rule(
        name="views of products after another summand are summed first",
        given=("(add (add r (view s (mm a b))) (view s (mm c d)))",),
        gives=("(add r (view s (add (mm a b) (mm c d))))",),
        shapes={"r": "z", "a": "mk", "b": "kn", "c": "ml", "d": "ln"},
        numbers={"s": ("-1",)},
        when=("(beside b d)",),
    ),
    Rule(
        name="products distribute over sums",
        given=("(mm a (add b c))",),
        gives=("(add (mm a b) (mm a c))",),
        shapes={"a": "mk", "b": "kn", "c": "kn"},
        when=("(weight b)", "(weight c)"),
    ),
    Rule(
        name="products distribute over sums, from the left",
        given=("(mm (add a b) c)",),
        gives=("(add (mm a c) (mm b c))",),
        shapes={"a": "mk", "b": "mk", "c": "kn"},
        when=("(weight a)", "(weight b)"),
    ),
    Rule(
        name="linear layers distribute over sums",
        given=("(addmm p x (add a b))",),
        gives=("(add (addmm p x a) (mm x b))",),
        shapes={"p": "n", "x": "mk", "a": "kn", "b": "kn"},
        when=("(weight a)", "(weight b)"),
    ),
)
"""Of matrix products."""

SCALING = (
    Rule(
        name="a product scaled by its left side",
        given=("(scale s (mm a b))",),
        gives=("(mm (scale s a) b)",),
        shapes={"a": "mk", "b": "kn"},
        numbers={"s": (0.5, -2.0)},
        when=("(weight a)",),
    ),
    Rule(
        name="a product scaled by its right side",
        given=("(scale s (mm a b))",),
        gives=("(mm a (scale s b))",),
        shapes={"a": "mk", "b": "kn"},
        numbers={"s": (0.5, -2.0)},
        when=("(weight b)",),
    ),
    Rule(
        name="a product of what is scaled",
        given=("(mm (scale s a) b)",),
        gives=("(scale s (mm a b))",),
        shapes={"a": "mk", "b": "kn"},
        numbers={"s": (0.5, -2.0)},
    ),
    Rule(
        name="a product with what is scaled",
        given=("(mm a (scale s b))",),
        gives=("(scale s (mm a b))",),
        shapes={"a": "mk", "b": "kn"},
        numbers={"s": (0.5, -2.0)},
    ),
    Rule(
        name="scaled twice",
        given=("(scale s (scale r a))",),
        gives=("(scale (* s r) a)",),
        shapes={"a": "mn*"},
        numbers={"s": (0.5, -2.0), "r": (0.25, 3.0)},
    ),
    Rule(name="scaled by one", given=("(scale 1.0 a)",), gives=("a",), shapes={"a": "mn*"}),
    Rule(
        name="a sum of what is scaled alike",
        given=("(add (scale s a) (scale s b))",),
        gives=("(scale s (add a b))",),
        shapes={"a": "mn*", "b": "mn*"},
        numbers={"s": (0.5, -2.0)},
    ),
    Rule(
        name="a part, scaled",
        given=("(scale f (slice d s e a))",),
        gives=("(slice d s e (scale f a))",),
        shapes={"a": "mn*"},
        numbers={"f": (0.5, -2.0), "d": (0, 1, 2), "s": (0, 1), "e": (1, 2)},
    ),
    Rule(
        name="transposed and scaled",
        given=("(scale s (t a))",),
        gives=("(t (scale s a))",),
        shapes={"a": "mn"},
        numbers={"s": (0.5, -2.0)},
    ),
    Rule(
        name="scaled and transposed",
        given=("(t (scale s a))",),
        gives=("(scale s (t a))",),
        shapes={"a": "mn"},
        numbers={"s": (0.5, -2.0)},
    ),
    Rule(
        name="a view, scaled",
        given=("(scale f (view s a))",),
        gives=("(view s (scale f a))",),
        shapes={"a": "mn*"},
        numbers={"f": (0.5, -2.0), "s": ("-1", "1,-1")},
    ),
    Rule(
        name="a batch of products scaled by its left sides",
        given=("(scale s (bmm a b))",),
        gives=("(bmm (scale s a) b)",),
        shapes={"a": "bmk", "b": "bkn"},
        numbers={"s": (0.5, -2.0)},
    ),
    Rule(
        name="a batch of products scaled by its right sides",
        given=("(scale s (bmm a b))",),
        gives=("(bmm a (scale s b))",),
        shapes={"a": "bmk", "b": "bkn"},
        numbers={"s": (0.5, -2.0)},
    ),
    Rule(
        name="a batch of products of what is scaled",
        given=("(bmm (scale s a) b)",),
        gives=("(scale s (bmm a b))",),
        shapes={"a": "bmk", "b": "bkn"},
        numbers={"s": (0.5, -2.0)},
    ),
    Rule(
        name="a batch of products with what is scaled",
        given=("(bmm a (scale s b))",),
        gives=("(scale s (bmm a b))",),
        shapes={"a": "bmk", "b": "bkn"},
        numbers={"s": (0.5, -2.0)},
    ),
    Rule(
        name="in another order and scaled",
        given=("(scale f (perm p a))",),
        gives=("(perm p (scale f a))",),
        shapes={"a": "lmn"},
        numbers={"f": (0.5, -2.0), "p": ("0,2,1", "2,0,1")},
    ),
    Rule(
        name="scaled and in another order",
        given=("(perm p (scale f a))",),
        gives=("(scale f (perm p a))",),
        shapes={"a": "lmn"},
        numbers={"f": (0.5, -2.0), "p": ("0,2,1", "2,0,1")},
    ),
    Rule(
        name="scaled and viewed",
        given=("(view s (scale f a))",),
        gives=("(scale f (view s a))",),
        shapes={"a": "mn"},
        numbers={"f": (0.5, -2.0), "s": ("-1", "1,-1")},
    ),
)
"""Of numbers that tensors are multiplied with."""

RULES = (*PRODUCTS, *CONVOLUTIONS, *GRADIENTS, *ELEMENTWISE, *SCALING, *ORDERS, *SHAPES)
"""All."""
TOLD = (*PRODUCTS, *CONVOLUTIONS, *GRADIENTS, *SCALING)
"""Those that people are told of; the others only carry them on."""
