"""Rules of where tensors lie: slices, transposes, views, what lies side by side, and elementwise functions of those."""

from plait.rewrite.rules.rule import Rule

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

_ORDERS = ("0,2,1", "2,0,1", "1,2,0", "0,1,2")
"""That a proof tries."""

ORDERS = (
    Rule(
        name="in another order twice",
        given=("(perm q (perm p a))",),
        gives=("(perm r a)",),
        shapes={"a": "lmn"},
        numbers={"p": _ORDERS, "q": _ORDERS},
        when=("(then p q r)",),
    ),
    Rule(
        name="in its own order",
        given=("(perm p a)",),
        gives=("a",),
        shapes={"a": "lmn"},
        numbers={"p": _ORDERS},
        when=("(itself p)",),
    ),
    Rule(
        name="an elementwise function in another order",
        given=("(map1 f (perm p a))",),
        gives=("(perm p (map1 f a))",),
        shapes={"a": "lmn"},
        numbers={"f": ("relu.default", "silu.default"), "p": _ORDERS},
    ),
    Rule(
        name="an elementwise function of what is in another order",
        given=("(map2 f (perm p a) (perm p b))",),
        gives=("(perm p (map2 f a b))",),
        shapes={"a": "lmn", "b": "lmn"},
        numbers={"f": ("mul.Tensor", "threshold_backward.default 0"), "p": _ORDERS},
    ),
    Rule(
        name="a sum in another order",
        given=("(add (perm p a) (perm p b))",),
        gives=("(perm p (add a b))",),
        shapes={"a": "lmn", "b": "lmn"},
        numbers={"p": _ORDERS},
    ),
    Rule(
        name="a part in another order",
        given=("(slice d s e (perm p a))",),
        gives=("(perm p (slice g s e a))",),
        shapes={"a": "lmn"},
        numbers={"p": _ORDERS, "d": (0, 1, 2), "s": (0, 1), "e": (1, 2)},
        when=("(axis p d g)",),
    ),
    Rule(
        name="side by side in another order",
        given=("(cat d (perm p a) (perm p b))",),
        gives=("(perm p (cat g a b))",),
        shapes={"a": "lmn", "b": "lmn"},
        numbers={"p": _ORDERS, "d": (0, 1, 2)},
        when=("(axis p d g)",),
    ),
    Rule(
        name="an elementwise function transposed",
        given=("(map1 f (t a))",),
        gives=("(t (map1 f a))",),
        shapes={"a": "mn"},
        numbers={"f": ("relu.default", "silu.default")},
    ),
    Rule(
        name="an elementwise function of what is transposed",
        given=("(map2 f (t a) (t b))",),
        gives=("(t (map2 f a b))",),
        shapes={"a": "mn", "b": "mn"},
        numbers={"f": ("mul.Tensor", "threshold_backward.default 0")},
    ),
    Rule(
        name="a sum of what is transposed",
        given=("(add (t a) (t b))",),
        gives=("(t (add a b))",),
        shapes={"a": "mn", "b": "mn"},
    ),
    Rule(
        name="an elementwise function of a view",
        given=("(map1 f (view s a))",),
        gives=("(view s (map1 f a))",),
        shapes={"a": "mn*"},
        numbers={"f": ("relu.default", "silu.default"), "s": ("-1", "1,-1")},
    ),
    Rule(
        name="an elementwise function of views",
        given=("(map2 f (view s a) (view s b))",),
        gives=("(view s (map2 f a b))",),
        shapes={"a": "mn", "b": "mn"},
        numbers={"f": ("mul.Tensor", "threshold_backward.default 0"), "s": ("-1", "1,-1")},
        when=("(= (shape a) (shape b))",),
    ),
    Rule(
        name="a view of its own shape",
        given=("(view s a)",),
        gives=("a",),
        shapes={"a": "mn"},
        numbers={"s": ("2,3", "3,2", "6,1", "1,6", "2,2")},
        when=("(= (named s) (shape a))",),
    ),
)
"""Of dims in another order and of views: they come last, where they meet and vanish."""

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
