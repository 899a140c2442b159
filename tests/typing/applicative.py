"""What checkers know of the applicative: `pure`, `ap`, `lift`, `sequence`, `traverse`, and the methods of values."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import NamedTuple, TypeVar, assert_type

import recompute as rc

T = TypeVar("T")


class Parts(NamedTuple):
    whole: int
    rest: float


def half(number: int) -> float:
    return number / 2


def words(count: int, word: str = "", *, upper: bool = False) -> list[str]:
    return [word.upper() if upper else word] * count


def split(number: int) -> tuple[int, str]:
    return number, str(number)


def parts(number: float) -> Parts:
    return Parts(int(number), number % 1)


def first(items: list[T]) -> T:
    return items[0]


text = rc.pure("abc")
number = rc.pure(3)

# A value: what it holds, and that methods which return it keep its type.
assert_type(text, rc.Recomputable[str])
assert_type(text.get(), str)
assert_type(text.pin(), rc.Recomputable[str])
assert_type(text.pin().unpin().detach().get(), str)
assert_type(text.map(len), rc.Recomputable[int])
assert_type(text.map(lambda held: held.upper()), rc.Recomputable[str])
anything: rc.Recomputable[object] = number  # covariant, as only `get` gives something

# ap: of functions, classes, lambdas, partial functions, and of Recomputables of functions.
assert_type(rc.ap(len, text), rc.Recomputable[int])
assert_type(rc.ap(len, "plain"), rc.Recomputable[int])
assert_type(rc.ap(int, "3", base=4), rc.Recomputable[int])
assert_type(rc.ap(words, number, text, upper=True), rc.Recomputable[list[str]])
assert_type(rc.ap(words, 3, text, nbytes=100).get(), list[str])
assert_type(rc.ap(partial(words, 3), text), rc.Recomputable[list[str]])
upper: rc.Recomputable[str] = rc.ap(lambda held: held.upper(), text)
tupled: rc.Recomputable[tuple[int, str]] = rc.ap(lambda left, right: (left, right), number, text)
assert_type(rc.ap(first, rc.pure(["a"])), rc.Recomputable[str])
assert_type(rc.ap(rc.pure(half), number), rc.Recomputable[float])
assert_type(rc.ap(rc.pure(half), 3), rc.Recomputable[float])
assert_type(rc.pure(half).apply(number), rc.Recomputable[float])
assert_type(rc.pure(half).apply(3, nbytes=8).get(), float)

# ap with several outputs.
assert_type(rc.ap(split, number, nout=2), tuple[rc.Recomputable[int], rc.Recomputable[str]])
assert_type(rc.ap(parts, 3.5, nout=2), tuple[rc.Recomputable[int], rc.Recomputable[float]])
assert_type(rc.ap(rc.pure(split), number, nout=2), tuple[rc.Recomputable[int], rc.Recomputable[str]])
assert_type(rc.pure(split).apply(number, nout=2)[1].get(), str)
one, two = rc.ap(words, 2, nout=2)
a, b, c = rc.ap(words, 3, nout=3)

# lift: the parameters of the function, each of them plain or not.
lifted = rc.lift(words)
assert_type(lifted(3, "a", upper=True), rc.Recomputable[list[str]])
assert_type(lifted(number, text), rc.Recomputable[list[str]])
assert_type(lifted(number, word=text, upper=True), rc.Recomputable[list[str]])
assert_type(lifted.__name__, str)
assert_type(rc.lift(split, nout=2)(number), tuple[rc.Recomputable[int], rc.Recomputable[str]])


@rc.lift
def double(count: int) -> int:
    return 2 * count


@rc.lift(nbytes=8)
def triple(count: int) -> int:
    return 3 * count


@rc.lift(nout=2)
def both(count: int) -> tuple[int, str]:
    return count, str(count)


class Model:
    @rc.lift
    def step(self, count: int) -> float:
        return count / 2


assert_type(double(number).get(), int)
assert_type(triple(double(2)).get(), int)
assert_type(both(number), tuple[rc.Recomputable[int], rc.Recomputable[str]])
assert_type(Model().step(3), rc.Recomputable[float])
assert_type(Model().step(number), rc.Recomputable[float])

# sequence and traverse.
assert_type(rc.sequence([text, text]), rc.Recomputable[list[str]])
assert_type(rc.sequence((number, text)), rc.Recomputable[tuple[int, str]])
assert_type(rc.sequence((text, text, text)), rc.Recomputable[tuple[str, ...]])
assert_type(rc.sequence({"a": text}), rc.Recomputable[dict[str, str]])
assert_type(rc.sequence(value for value in [text]), rc.Recomputable[list[str]])
assert_type(rc.sequence(deque([text])), rc.Recomputable[list[str]])
assert_type(rc.traverse(double, [1, 2]), rc.Recomputable[list[int]])
assert_type(rc.traverse(lambda count: rc.ap(half, count), range(3)).get(), list[float])
