"""A rule: what is equal to what, in a line or two.

In: text such as `(mm (mm a b) c)`. Out: a `Rule`, and its form for egglog. Variables are names; `(size a 1)` is the
length of a dim; everything else is a word of `language.py`.
"""

from dataclasses import dataclass
from typing import Any

from plait.rewrite.rules.language import WORDS

Term = Any
"""A name, a number, or a list of a word and its terms."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Some terms of a graph, and what each of them is equal to."""

    name: str
    """As people read it."""
    given: tuple[str, ...]
    """Terms that must be there, all of them."""
    gives: tuple[str, ...]
    """What each of them equals; none: the terms are just to be there."""
    parts: dict[str, str] | None = None
    """What variables equal, where terms are just to be there."""
    shapes: dict[str, str]
    """Of every tensor, a letter for each dim: the same letter is the same length; `*`: any further dims."""
    numbers: dict[str, tuple[Any, ...]] | None = None
    """Of every other variable, what a proof tries."""
    when: tuple[str, ...] = ()
    """What must hold besides, as facts of egglog: `(next a b)`, `(= 0 d)`."""


def parse(text: str) -> Term:
    """The term that a text says."""
    tokens = text.replace("(", " ( ").replace(")", " ) ").split()

    def term() -> Term:
        token = tokens.pop(0)
        if token != "(":
            return token
        found = []
        while tokens[0] != ")":
            found.append(term())
        tokens.pop(0)
        return found

    made = term()
    assert not tokens, f"more than one term: {text}"
    return made


def as_egglog(rule: Rule) -> str:
    """The rule as a command."""
    sizes: dict[tuple[str, str], str] = {}

    def write(term: Term) -> str:
        if isinstance(term, str):
            return term
        if term[0] == "size":
            at = (term[1], term[2])
            sizes.setdefault(at, f"size_{term[1]}_{term[2]}")
            return sizes[at]
        return f"({' '.join(write(entry) for entry in term)})"

    body = [f"(= left{i} {write(parse(text))})" for i, text in enumerate(rule.given)]
    when = [write(parse(text)) for text in rule.when]
    actions = [f"(union left{i} {write(parse(text))})" for i, text in enumerate(rule.gives)]
    actions += [f"(union {name} {write(parse(text))})" for name, text in (rule.parts or {}).items()]
    tensors = dict.fromkeys(name for name, _ in sizes)
    body += [f"(= shape_{name} (shape {name}))" for name in tensors]
    body += [f"(= {variable} (vec-get shape_{name} {dim}))" for (name, dim), variable in sizes.items()]
    return f'(rule ({" ".join(body + when)}) ({" ".join(actions)}) :name "{rule.name}")'


HEADER = "\n".join(
    [
        "(sort T)",
        "(sort Shape (Vec i64))",
        "(constructor in (i64) T)",
        "(constructor term (i64) T)",
        "(function shape (T) Shape :merge old)",
        "(relation next (T T))",
        "(relation beside (T T))",
        "(relation head (T))",
        "(relation weight (T))",
        "(relation grows (T i64 i64))",
        "(relation then (String String String))",
        "(relation itself (String))",
        "(relation axis (String i64 i64))",
        "(function named (String) Shape :merge old)",
        *(
            f"(constructor {name} ({' '.join([*word.numbers, *['T'] * word.tensors])}) T)"
            for name, word in WORDS.items()
        ),
        "(rule ((= c (mm a b)) (= x (shape a)) (= y (shape b)))"
        " ((set (shape c) (vec-of (vec-get x 0) (vec-get y 1)))))",
        "(rule ((= c (bmm a b)) (= x (shape a)) (= y (shape b)))"
        " ((set (shape c) (vec-of (vec-get x 0) (vec-get x 1) (vec-get y 2)))))",
        "(rule ((= c (t a)) (= x (shape a))) ((set (shape c) (vec-of (vec-get x 1) (vec-get x 0)))))",
        "(rule ((= c (add a b)) (= x (shape a))) ((set (shape c) x)))",
        "(rule ((= c (scale s a)) (= x (shape a))) ((set (shape c) x)))",
        "(rule ((= c (map1 s a)) (= x (shape a))) ((set (shape c) x)))",
        "(rule ((= c (map2 s a b)) (= x (shape a))) ((set (shape c) x)))",
        "(rule ((= c (cat d a b)) (= x (shape a)) (= y (shape b)))"
        " ((set (shape c) (vec-set x d (+ (vec-get x d) (vec-get y d))))))",
        "(rule ((= c (slice d s e a)) (= x (shape a))) ((set (shape c) (vec-set x d (- e s)))))",
        "(rule ((= c (pad h w a)) (= x (shape a)))"
        " ((set (shape c) (vec-set (vec-set x 2 (+ (* 2 h) (vec-get x 2))) 3 (+ (* 2 w) (vec-get x 3))))))",
        "(rule ((= c (convx p y z d g x w)) (= s (shape x))) ((set (shape c) s)))",
        "(rule ((= c (convw p y z d g x w)) (= s (shape w))) ((set (shape c) s)))",
        "(rule ((= c (convs g)) (= s (shape g))) ((set (shape c) (vec-of (vec-get s 1)))))",
        *(  # merged: as its parts are, with the channels of all
            f"(rule ((= c {conv}) (= part (slice 1 b e c)) (= s (shape part)) (= k (shape w)))"
            " ((set (shape c) (vec-set s 1 (vec-get k 0)))))"
            for conv in ("(conv p y z d x w)", "(convb p y z d x w r)")
        ),
        # what is made of parameters alone
        "(rule ((= c (mm a b)) (weight a) (weight b)) ((weight c)))",
        "(rule ((= c (t a)) (weight a)) ((weight c)))",
        # what lies side by side: runs of neighbours, however they are put together
        "(rule ((next a b)) ((beside a b) (beside b a)))",
        # kernels, and by how much a neighbour is larger on each side
        "(rule ((beside a b) (= x (shape a)) (= y (shape b)) (= 4 (vec-length x))"
        " (= h (- (vec-get y 2) (vec-get x 2))) (= w (- (vec-get y 3) (vec-get x 3)))"
        " (= 0 (% h 2)) (= 0 (% w 2)) (= k (max 0 (/ h 2))) (= l (max 0 (/ w 2))) (>= (+ k l) 1))"
        " ((grows a k l)))",
        "(rule ((next a b) (= c (pad h w a))) ((next c b)))",
        "(rule ((next a b) (= c (pad h w b))) ((next a c)))",
        "(rule ((head a) (= c (pad h w a))) ((head c)))",
        "(rule ((next a b) (= c (cat d b e)) (next b e)) ((next a c)))",
        "(rule ((next b e) (= c (cat d a b)) (next a b)) ((next c e)))",
        "(rule ((head a) (next a b) (= c (cat d a b))) ((head c)))",
        "(rule ((head x) (= x (t a))) ((head a)))",
        "(rule ((head x) (= a (t x))) ((head a)))",
        "(rule ((next x y) (= x (t a)) (= y (t b))) ((next a b)))",
        "(rule ((next x y) (= a (t x)) (= b (t y))) ((next a b)))",
    ]
)
"""What rules stand on: words, shapes, neighbours."""
