from __future__ import annotations
from typing import Any, assert_type, NamedTuple
from functools import partial
from collections import deque
import recompute as rc
import numpy as np

def double(x: float) -> float: return 2*x
def pair(x: int) -> tuple[int, str]: return x, str(x)
def rest(a: int, b: str = "", *, c: bool = False) -> list[int]: return []
class Eig(NamedTuple):
    a: int
    b: float
def eig(x: int) -> Eig: return Eig(1, 2.0)
x = rc.pure("abc")
reveal_type(x)
reveal_type(rc.ap(len, x))
reveal_type(rc.ap(len, x).get())
reveal_type(rc.ap(double, 1.0))
reveal_type(rc.ap(rc.pure(len), x))
reveal_type(rc.ap(rc.pure(double), x))
reveal_type(rc.ap(rc.pure(lambda x: 3), x))
reveal_type(rc.ap(lambda s: [s], x))
reveal_type(rc.ap(int, "3"))
reveal_type(rc.ap(rc.pure(int), "3"))
reveal_type(rc.ap(partial(rest, 1), "3"))
reveal_type(rc.ap(pair, 3, nout=2))
reveal_type(rc.ap(rc.pure(pair), 3, nout=2))
reveal_type(rc.ap(eig, 3, nout=2))
reveal_type(rc.ap(divmod, 7, 3, nout=2))
reveal_type(rc.ap(np.linalg.eigh, 3, nout=2))
reveal_type(rc.ap(np.tanh, 3))
reveal_type(rc.ap(np.matmul, 3))
reveal_type(rc.ap(np.sum, 3))
reveal_type(rc.ap(max, 3, 4))
reveal_type(rc.ap(sum, [3, 4]))
reveal_type(rc.ap(rest, 3, nout=3))
reveal_type(rc.ap(pair, 3, nbytes=5))
l = rc.lift(rest)
reveal_type(l)
reveal_type(l(1, "a", c=True))
reveal_type(l(rc.pure(1), rc.pure("a"), c=rc.pure(True)))
reveal_type(l.__name__)
reveal_type(rc.lift(np.matmul)(x, x))
reveal_type(rc.lift(np.sum)(x))
reveal_type(rc.lift(max)(x))
@rc.lift
def f(x: int) -> str: return ""
@rc.lift(nout=2)
def g(x: int) -> tuple[int, str]: return 1, ""
@rc.lift(nbytes=8)
def h(x: int) -> str: return ""
@rc.lift(nout=3)
def k(x: int) -> list[str]: return []
reveal_type(f(1))
reveal_type(g(1))
reveal_type(h(1))
reveal_type(k(1))
class C:
    @rc.lift
    def m(self, a: int) -> str: return ""
reveal_type(C().m(1))
reveal_type(C().m(rc.pure(1)))
y: rc.Recomputable[object] = rc.pure(3)
reveal_type(x.map(len))
reveal_type(x.map(lambda s: s.upper()))
reveal_type(x.map(str.upper).get())
reveal_type(rc.pure(double).apply(3))
reveal_type(rc.pure(pair).apply(3, nout=2))
reveal_type(x.pin().unpin().detach())
reveal_type(rc.sequence([x, x]))
reveal_type(rc.sequence((x, rc.pure(3))))
reveal_type(rc.sequence((x, x, x)))
reveal_type(rc.sequence({"a": x}))
reveal_type(rc.sequence(v for v in [x]))
reveal_type(rc.sequence(deque([x])))
w = rc.wrap(np.ones(3))
reveal_type(w)
reveal_type(w.pin())
reveal_type(rc.sequence({"a": w}))
reveal_type(rc.traverse(lambda n: rc.ap(double, n), [1, 2]))
reveal_type(rc.traverse(f, [1, 2]))
