"""Rules of convolutions of images, and of their gradients."""

from plait.rewrite.rule import Rule

GRADIENTS = (
    Rule(
        name="gradients of one image are summed first",
        given=("(add (add r (convx p g x a)) (convx q h x b))",),
        gives=("(add r (add (convx p g x a) (convx q h x b)))",),
        shapes={"r": "mihw", "g": "mohw", "h": "mphw", "x": "mihw", "a": "oicc", "b": "picc"},
        numbers={"p": ("1,1|0,0|1,1", "1,1|1,1|1,1"), "q": ("1,1|0,0|1,1", "1,1|1,1|1,1")},
        when=("(beside a b)",),
    ),
    Rule(
        name="gradients of one image merge",
        given=("(add (convx p g x a) (convx p h x b))",),
        gives=("(convx p (cat 1 g h) x (cat 0 a b))",),
        shapes={"g": "mohw", "h": "mphw", "x": "mihw", "a": "oicc", "b": "picc"},
        numbers={"p": ("1,1|0,0|1,1", "1,1|1,1|1,1")},
        when=("(next a b)", "(= (size a 2) (size b 2))", "(= (size a 3) (size b 3))"),
    ),
    Rule(
        name="gradients of one image merge, from the right",
        given=("(add (convx p g x a) (convx p h x b))",),
        gives=("(convx p (cat 1 h g) x (cat 0 b a))",),
        shapes={"g": "mohw", "h": "mphw", "x": "mihw", "a": "oicc", "b": "picc"},
        numbers={"p": ("1,1|0,0|1,1", "1,1|1,1|1,1")},
        when=("(next b a)", "(= (size a 2) (size b 2))", "(= (size a 3) (size b 3))"),
    ),
    Rule(
        name="gradients of kernels on one image merge",
        given=("(convw p g x a)", "(convw p h x b)"),
        gives=(
            "(slice 0 0 (size a 0) (convw p (cat 1 g h) x (cat 0 a b)))",
            "(slice 0 (size a 0) (+ (size a 0) (size b 0)) (convw p (cat 1 g h) x (cat 0 a b)))",
        ),
        shapes={"g": "mohw", "h": "mphw", "x": "mihw", "a": "oicc", "b": "picc"},
        numbers={"p": ("1,1|0,0|1,1", "1,1|1,1|1,1")},
        when=("(next a b)", "(head a)", "(= (size a 2) (size b 2))", "(= (size a 3) (size b 3))"),
    ),
    Rule(
        name="gradients of biases merge with those of kernels",
        given=("(convs g)", "(convs h)", "(convw p g x a)", "(convw p h x b)"),
        gives=(
            "(slice 0 0 (size a 0) (convs (cat 1 g h)))",
            "(slice 0 (size a 0) (+ (size a 0) (size b 0)) (convs (cat 1 g h)))",
        ),
        shapes={"g": "mohw", "h": "mphw", "x": "mihw", "a": "oicc", "b": "picc"},
        numbers={"p": ("1,1|0,0|1,1", "1,1|1,1|1,1")},
        when=("(next a b)", "(head a)"),
    ),
    Rule(
        name="the gradient of an image through a kernel of nine positions",
        given=('(convx "1,1|0,0|1,1" g x a)',),
        gives=('(convx "1,1|1,1|1,1" g x (pad a))',),
        shapes={"g": "mohw", "x": "mihw", "a": "oicc"},
        when=("(= 1 (size a 2))", "(= 1 (size a 3))"),
    ),
    Rule(
        name="the gradient of a kernel as part of one of nine positions",
        given=('(convw "1,1|0,0|1,1" g x a)',),
        gives=('(slice 3 1 2 (slice 2 1 2 (convw "1,1|1,1|1,1" g x (pad a))))',),
        shapes={"g": "mohw", "x": "mihw", "a": "oicc"},
        when=("(= 1 (size a 2))", "(= 1 (size a 3))"),
    ),
)
"""Of convolutions' gradients."""

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
