"""A forgotten `get`: whatever is done to a Recomputable as if it were its value is an error that names the cure."""

from __future__ import annotations

import copy
import dataclasses
import keyword
import math
import operator
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import recompute as rc
from recompute._forgotten import METHODS, Forgotten

OPERATORS = [
    operator.add, operator.sub, operator.mul, operator.matmul, operator.truediv, operator.floordiv, operator.mod,
    divmod, pow, operator.lshift, operator.rshift, operator.and_, operator.xor, operator.or_,
    operator.lt, operator.le, operator.gt, operator.ge,
]  # fmt: skip

FUNCTIONS: list[Callable[[Any], Any]] = [
    bool, int, float, complex, bytes, len, iter, list, abs, round, sum, operator.neg, operator.pos, operator.invert,
    operator.index, operator.not_, math.sqrt, math.floor, sorted, "{:.2f}".format,
    lambda x: x[0], lambda x: x[1:], lambda x: 1 in x, lambda x: operator.setitem(x, 0, 1),
    lambda x: operator.delitem(x, 0), lambda x: (lambda *args: args)(*x), lambda x: pow(x, 2, 3),
    np.sum, np.sin, np.asarray, np.array, np.float64, np.ones(3).__add__, np.ones(3).dot,
    lambda x: np.asarray([x, x]), lambda x: np.where(x, 1, 2), lambda x: np.add(1, x), lambda x: np.ones(3) @ x,
]  # fmt: skip


@pytest.fixture(params=["source", "result", "evicted"])
def x(request: pytest.FixtureRequest) -> rc.Recomputable[Any]:
    """One in each state."""
    with rc.Cache():
        if request.param == "source":
            return rc.pure(np.ones(3))
        y: rc.Recomputable[Any] = rc.ap(np.ones, 3)
        if request.param == "evicted":
            assert y.evict()
        return y


def names_the_cure(error: pytest.ExceptionInfo[BaseException]) -> bool:
    return ".get()" in str(error.value) and "rc.array" in str(error.value)


@pytest.mark.parametrize("function", OPERATORS)
@pytest.mark.parametrize("other", [2, 2.5, np.ones(3), [1]], ids=repr)
def test_operators(x: rc.Recomputable[Any], function: Callable[..., Any], other: Any) -> None:
    """Arithmetic and order, from either side, with numbers, arrays and itself; in place, too."""
    for operands in ((x, other), (other, x), (x, x)):
        with pytest.raises(TypeError) as error:
            function(*operands)
        assert names_the_cure(error)
    in_place = getattr(operator, f"i{function.__name__.strip('_')}", None)
    if in_place is not None:
        with pytest.raises(TypeError) as error:
            in_place(x, other)
        assert names_the_cure(error)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions(x: rc.Recomputable[Any], function: Callable[[Any], Any]) -> None:
    """Conversions, elements, functions of NumPy, formats."""
    with pytest.raises(TypeError) as error:
        function(x)
    assert names_the_cure(error)


def test_a_condition(x: Any) -> None:
    """`if`, `while`, `and`, `not`: the error says what needed the value."""
    with pytest.raises(TypeError, match=r"^a condition needs the value that <Recomputable .*> holds"):
        assert x
    with pytest.raises(TypeError, match=r"^\+ needs the value"):
        x + 1
    with pytest.raises(TypeError, match=r"^iteration needs the value"):
        list(x)


@given(name=st.from_regex(r"[a-z][a-z_0-9]*", fullmatch=True) | st.sampled_from(["T", "shape", "sum", "append"]))
def test_attributes(name: str) -> None:
    """What a Recomputable does not have is an AttributeError with the attribute of the value; `hasattr` is False."""
    with rc.Cache():
        y = rc.pure([1])
    if name in dir(y) or keyword.iskeyword(name):
        return
    assert not hasattr(y, name)
    assert getattr(y, name, 5) == 5
    with pytest.raises(AttributeError) as error:
        getattr(y, name)
    assert names_the_cure(error)
    assert f".get().{name}" in str(error.value)
    assert (error.value.name, error.value.obj) == (name, y)  # from which Python makes a suggestion


@dataclasses.dataclass
class Pair:
    one: Any
    other: Any


def test_what_objects_can_still_do(x: rc.Recomputable[Any]) -> None:
    """Equality, hash, sets, dicts, text, copies, pickles, dataclasses, and the looks of tools."""
    with x.cache:
        y = rc.pure(np.ones(3))
        assert x == x
        assert x != y
        assert x != 3  # type: ignore[comparison-overlap]
        assert len({x, y, x}) == 2
        assert {x: 1}[x] == 1
        assert [x, y].index(y) == 1
        assert f"{x}" == str(x) == repr(x)
        assert not callable(x)
        assert not np.iterable(x)
        assert isinstance(x, rc.Recomputable)
        for other in (copy.copy(x), copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
            assert other.get().tolist() == [1, 1, 1]
        pair = Pair(x, y)
        assert pair == Pair(x, y)
        assert dataclasses.replace(pair, one=y) == Pair(y, y)
        assert dataclasses.asdict(pair)["one"].get().tolist() == [1, 1, 1]
        cells = np.empty(2, object)
        cells[0] = x  # one that means it can have handles in an array
        assert cells[0] is x
        assert not hasattr(x, "__wrapped__")
        assert not hasattr(x, "_ipython_canary_method_should_not_exist_")


def test_pytest_explains_a_comparison_of_them(x: rc.Recomputable[Any]) -> None:
    """The rewriting of assertions looks at both sides, and shows what they are."""
    with x.cache:
        y = rc.pure(1)
    with pytest.raises(AssertionError, match="<Recomputable source"):
        assert [x] == [y]
    with pytest.raises(AssertionError, match="<Recomputable source"):
        assert x == y


def test_wrapped_arrays_have_all_of_it() -> None:
    """None of the errors reaches a RecomputableArray, beside which a Recomputable is an operand as ever."""
    for name in METHODS:
        assert getattr(rc.RecomputableArray, name) is not getattr(Forgotten, name)
    assert rc.RecomputableArray.__getattr__ is not Forgotten.__getattr__  # type: ignore[attr-defined]
    with rc.Cache():
        array: Any = rc.array(np.arange(3.0))
        plain: Any = rc.ap(np.ones, 3)
        results = [array + plain, plain + array, np.add(plain, array), np.where(array > 0, plain, array)]
        assert [result.get().tolist() for result in results] == [[1, 2, 3], [1, 2, 3], [1, 2, 3], [0, 1, 1]]
        assert np.stack([plain, array]).shape == (2, 3)
        assert (np.sum(array), len(array), f"{array[2]:.1f}") == (3, 3, "2.0")
