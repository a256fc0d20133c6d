"""The rules: equations between ops of aten, each held to be true by its proof (`proof.py`) and nothing else.

`(next a b)` says that `b` follows `a` among tensors that may lie side by side: it keeps merges to runs of neighbours,
of which there are few, where subsets would be many; `(head a)` that a run begins there. `(weight a)` says that `a` is
made of parameters alone: sums of those are taken apart, sums along the way of the data are not.
"""

from plait.rewrite.rule import Rule

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

CONVOLUTIONS = (
    Rule(
        name="convolutions of one input merge",
        given=("(conv p x a)", "(conv p x b)"),
        gives=(
            "(slice 1 0 (size a 0) (conv p x (cat 0 a b)))",
            "(slice 1 (size a 0) (+ (size a 0) (size b 0)) (conv p x (cat 0 a b)))",
        ),
        shapes={"x": "mihw", "a": "oicd", "b": "picd"},
        numbers={"p": ("1,1|1,1|1,1", "2,1|1,2|1,1")},
        when=("(next a b)", "(head a)", "(= (size a 2) (size b 2))", "(= (size a 3) (size b 3))"),
    ),
    Rule(
        name="convolutions with biases of one input merge",
        given=("(convb p x a r)", "(convb p x b s)"),
        gives=(
            "(slice 1 0 (size a 0) (convb p x (cat 0 a b) (cat 0 r s)))",
            "(slice 1 (size a 0) (+ (size a 0) (size b 0)) (convb p x (cat 0 a b) (cat 0 r s)))",
        ),
        shapes={"x": "mihw", "a": "oicd", "b": "picd", "r": "o", "s": "p"},
        numbers={"p": ("1,1|1,1|1,1",)},
        when=("(next a b)", "(head a)", "(= (size a 2) (size b 2))", "(= (size a 3) (size b 3))"),
    ),
    Rule(
        name="a kernel of one position is one of nine",
        given=('(conv "1,1|0,0|1,1" x a)',),
        gives=('(conv "1,1|1,1|1,1" x (pad a))',),
        shapes={"x": "mihw", "a": "oicc"},
        when=("(= 1 (size a 2))", "(= 1 (size a 3))"),
    ),
)
"""Of convolutions."""

ELEMENTWISE = (
    Rule(
        name="an elementwise function of a part",
        given=("(map1 f (slice d s e a))",),
        gives=("(slice d s e (map1 f a))",),
        shapes={"a": "mn*"},
        numbers={"f": ("relu.default", "silu.default"), "d": (0, 1, 2), "s": (0, 1), "e": (1, 2)},
    ),
    Rule(
        name="an elementwise function of parts",
        given=("(map2 f (slice d s e a) (slice d s e b))",),
        gives=("(slice d s e (map2 f a b))",),
        shapes={"a": "mn*", "b": "mn*"},
        numbers={
            "f": ("mul.Tensor", "threshold_backward.default 0"),
            "d": (0, 1, 2),
            "s": (0, 1),
            "e": (1, 2),
        },
        when=("(= (shape a) (shape b))",),
    ),
    Rule(
        name="an elementwise function side by side",
        given=("(cat d (map1 f a) (map1 f b))",),
        gives=("(map1 f (cat d a b))",),
        shapes={"a": "mn*", "b": "mn*"},
        numbers={"f": ("relu.default", "silu.default"), "d": (0, 1, 2)},
    ),
    Rule(
        name="elementwise functions side by side",
        given=("(cat d (map2 f a b) (map2 f x y))",),
        gives=("(map2 f (cat d a x) (cat d b y))",),
        shapes={"a": "mn*", "b": "mn*", "x": "mn*", "y": "mn*"},
        numbers={"f": ("mul.Tensor", "threshold_backward.default 0"), "d": (0, 1, 2)},
    ),
)
"""Of elementwise functions."""

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
)
"""Of numbers that tensors are multiplied with."""

SHAPES = (
    Rule(
        name="a product transposed",
        given=("(t (mm a b))",),
        gives=("(mm (t b) (t a))",),
        shapes={"a": "mk", "b": "kn"},
    ),
    Rule(
        name="a sum transposed",
        given=("(t (add a b))",),
        gives=("(add (t a) (t b))",),
        shapes={"a": "mn", "b": "mn"},
    ),
    Rule(name="transposed twice", given=("(t (t a))",), gives=("a",), shapes={"a": "mn"}),
    Rule(
        name="columns side by side are rows transposed",
        given=("(cat 1 (t a) (t b))",),
        gives=("(t (cat 0 a b))",),
        shapes={"a": "mk", "b": "nk"},
    ),
    Rule(
        name="rows side by side are columns transposed",
        given=("(cat 0 (t a) (t b))",),
        gives=("(t (cat 1 a b))",),
        shapes={"a": "km", "b": "kn"},
    ),
    Rule(
        name="a part transposed",
        given=("(t (slice d s e a))",),
        gives=("(slice (- 1 d) s e (t a))",),
        shapes={"a": "mn"},
        numbers={"d": (0, 1), "s": (0, 1), "e": (1, 2)},
    ),
    Rule(
        name="part of a part",
        given=("(slice d s e (slice d u v a))",),
        gives=("(slice d (+ u s) (+ u e) a)",),
        shapes={"a": "mn*"},
        numbers={"d": (0, 1, 2), "s": (0, 1), "e": (1, 2), "u": (0, 1), "v": (3,)},
        when=("(>= (- v u) e)",),
    ),
    Rule(
        name="parts put together again",
        given=("(cat d (slice d s m a) (slice d m e a))",),
        gives=("(slice d s e a)",),
        shapes={"a": "mn*"},
        numbers={"d": (0, 1, 2), "s": (0, 1), "m": (1,), "e": (2, 3)},
    ),
    Rule(
        name="all of it",
        given=("(slice d 0 e a)",),
        gives=("a",),
        shapes={"a": "mn*"},
        numbers={"d": (0, 1, 2), "e": (1, 2, 3)},
        when=("(= shape_all (shape a))", "(= e (vec-get shape_all d))"),
    ),
    Rule(
        name="side by side, to the right",
        given=("(cat d (cat d a b) c)",),
        gives=("(cat d a (cat d b c))",),
        shapes={"a": "mk*", "b": "mk*", "c": "mk*"},
        numbers={"d": (0, 1, 2)},
    ),
    Rule(
        name="side by side, to the left",
        given=("(cat d a (cat d b c))",),
        gives=("(cat d (cat d a b) c)",),
        shapes={"a": "mk*", "b": "mk*", "c": "mk*"},
        numbers={"d": (0, 1, 2)},
    ),
    Rule(
        name="parts of what lies side by side",
        given=("(cat 1 a b)",),
        gives=(),
        parts={
            "a": "(slice 1 0 (size a 1) (cat 1 a b))",
            "b": "(slice 1 (size a 1) (+ (size a 1) (size b 1)) (cat 1 a b))",
        },
        shapes={"a": "mn*", "b": "mk*"},
    ),
    Rule(
        name="sums of equal views",
        given=("(add (view s a) (view s b))",),
        gives=("(view s (add a b))",),
        shapes={"a": "mn", "b": "mn"},
        numbers={"s": ("-1",)},
        when=("(= (shape a) (shape b))",),
    ),
    Rule(
        name="a view of a view",
        given=("(view s (view u a))",),
        gives=("(view s a)",),
        shapes={"a": "mn"},
        numbers={"s": ("-1", "1,-1"), "u": ("-1", "-1,1")},
    ),
    Rule(
        name="sums of columns",
        given=("(rowsum (slice 1 s e a))",),
        gives=("(slice 1 s e (rowsum a))",),
        shapes={"a": "mn"},
        numbers={"s": (0, 1), "e": (1, 2)},
    ),
)
"""Of transposes, slices and what lies side by side."""

RULES = (*PRODUCTS, *CONVOLUTIONS, *ELEMENTWISE, *SCALING, *SHAPES)
"""All."""
TOLD = (*PRODUCTS, *CONVOLUTIONS, *SCALING)
"""Those that people are told of; the others only carry them on."""
