"""Rules of where tensors lie: slices, transposes, views, what lies side by side, and elementwise functions of those."""

from plait.rewrite.rule import Rule

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
