"""Fingerprints, by which `Cache(verify=True)` compares: equal where values are, and nowhere else."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from copy import deepcopy
from decimal import Decimal
from fractions import Fraction
from functools import cached_property, partial
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import recompute as rc
from recompute._adapters.adapter import fingerprint


class Point:
    def __init__(self, x: Any, y: Any = None) -> None:
        self.x = x
        self.y = y


class Count(int):
    """A number with attributes."""


class Row(list[Any]):
    """A list with attributes."""


class Proxy:
    """Its attributes are made when they are asked for."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __getattribute__(self, name: str) -> Any:
        if name == "__dict__":
            return {"numbers": [object.__getattribute__(self, "_number")]}
        return object.__getattribute__(self, name)


def with_attributes(value: Any, **attributes: Any) -> Any:
    vars(value).update(attributes)
    return value


class Lazy(Point):
    @cached_property
    def twice(self) -> Any:
        return 2 * self.x


@pytest.mark.parametrize(
    ("make", "look"),
    [
        (lambda: Path("folder/file"), lambda path: (hash(path), str(path), path.name)),
        (lambda: ip_network("10.0.0.0/8"), lambda network: network.broadcast_address),
        (lambda: Lazy(2), lambda lazy: lazy.twice),
    ],
    ids=["path", "network", "lazy"],
)
def test_verify_with_what_an_object_remembers_of_itself(make: Any, look: Any) -> None:
    """What a value has looked up is no change of it, neither where it is kept nor where it is made again."""
    with rc.Cache(verify=True):
        value = rc.ap(make)
        found = rc.ap(look, value)
        value.evict()
        found.evict()
        assert found.get() == look(value.get())
        value.evict()
        value.get()


@pytest.mark.parametrize("cls", [Point, Proxy, Decimal, Fraction], ids=lambda cls: cls.__name__)
def test_verify_with_parts_that_are_made_while_they_are_looked_at(cls: Any) -> None:
    """A function that returns the same objects each time is pure, and one that does not is not."""
    numbers = list(range(40))

    def make() -> list[Any]:
        return [cls(number) for number in numbers]

    with rc.Cache(verify=True):
        value = rc.ap(make)
        for _ in range(20):
            value.evict()
            value.get()
        numbers[20] = 7
        value.evict()
        with pytest.raises(rc.ImpureError, match="make"):
            value.get()


def _cycle(*numbers: int, back: int) -> list[Any]:
    """A list in a list in a list, and so on: the last one holds one of them."""
    lists: list[list[Any]] = [[number] for number in numbers]
    for outer, inner in zip(lists, [*lists[1:], lists[back]], strict=True):
        outer.append(inner)
    return lists[0]


def _through(other: int) -> list[Any]:
    """Two lists, in each a list that holds the first, or the one that it is in."""
    first: list[Any] = ["first"]
    second: list[Any] = ["second"]
    inner = [first]
    first.append(inner)
    second.append([[first, second][other]] if other else inner)
    return [first, second]


def _self_loop() -> list[Any]:
    loop: list[Any] = []
    loop.append(loop)
    return loop


DIFFERENT: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "ways back": (lambda: _cycle(1, 2, back=0), lambda: _cycle(1, 2, back=1)),
    "ways back from within": (lambda: _through(0), lambda: _through(1)),
    "attribute or part": (lambda: with_attributes(Row(), a=1), lambda: Row([{"a": 1}])),
    "number with attributes": (lambda: with_attributes(Count(1), a=1), lambda: with_attributes(Count(2), a=1)),
    "error with notes": (lambda: with_attributes(ValueError(1), a=1), lambda: with_attributes(ValueError(2), a=1)),
    "partial": (
        lambda: with_attributes(partial(pow, 1), a=1),
        lambda: with_attributes(partial(pow, 2), a=1),
    ),
    "factory": (lambda: defaultdict(int), lambda: defaultdict(list)),
    "longest": (lambda: deque([1], 2), lambda: deque([1], 3)),
    "type": (lambda: [1, True, 1.0], lambda: [1, 1, 1.0]),
    "zero": (lambda: [0.0], lambda: [-0.0]),
    "large": (lambda: [10**5000], lambda: [10**5000 + 1]),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_verify_tells_values_apart(what: str) -> None:
    """Two different values have two fingerprints; made twice, a value has one."""
    one, other = DIFFERENT[what]
    assert fingerprint(one()) == fingerprint(one()) != fingerprint(other()) == fingerprint(other()) is not None


def test_verify_takes_equal_parts_for_equal_whether_they_are_one_object_or_two() -> None:
    """What is shared in one run and copied in another is the same value; so is what contains itself, once or twice."""
    loop, word = _self_loop(), "".join(["a", "b"])
    for once, twice in (
        ([loop, [loop]], [_self_loop(), [_self_loop()]]),
        ([Decimal(1)] * 2, [Decimal(1), Decimal(1)]),
        ([[1]] * 2, [[1], [1]]),
        (slice(word, word), slice("ab", "ab")),
        (complex(1, 2), complex(1, 2)),
        (with_attributes(Count(1), a=word, b=word), with_attributes(Count(1), a="ab", b="".join(["a", "b"]))),
    ):
        assert fingerprint(once) == fingerprint(twice) is not None


def test_verify_says_nothing_of_what_has_no_order() -> None:
    """A set of instances that lead back to it is not compared: which of them comes first is different each time."""

    def net() -> Any:
        points = {Point(number) for number in range(5)}
        for point in points:
            point.y = points
        return points

    with rc.Cache(verify=True):
        value = rc.ap(net)
        for _ in range(10):
            value.evict()
            value.get()


def test_verify_with_many_that_refer_to_each_other() -> None:
    """Each of a hundred lists holds all of them: they are digested in no time."""
    lists: list[list[Any]] = [[number] for number in range(100)]
    for holder in lists:
        holder += lists
    with rc.Cache(verify=True):
        assert rc.pure(lists).get() is lists


ATOMS = st.sampled_from([None, True, 0, 1, 2, 0.0, -0.0, 1.0, float("nan"), "", "a", b"a", "1", len, int])
SHAPES = st.lists(
    st.tuples(
        st.sampled_from(["list", "tuple", "dict", "set", "deque", "Point", "Row", "Count", "share", "copy", "change"]),
        st.integers(0, 30),
        st.integers(0, 30),
        ATOMS,
    ),
    max_size=12,
)


class Built:
    """A value by a recipe, and what it is when everything in it is written out."""

    def __init__(self, recipe: list[tuple[str, int, int, Any]]) -> None:
        self.parts: list[Any] = [1, "a"]
        for what, one, other, atom in recipe:
            first, second = self.parts[one % len(self.parts)], self.parts[other % len(self.parts)]
            self.parts.append(self._make(what, first, second, atom))
        self.value = self.parts[-1]

    def _make(self, what: str, first: Any, second: Any, atom: Any) -> Any:
        match what:
            case "list" | "tuple" | "deque":
                return {"list": list, "tuple": tuple, "deque": deque}[what]([first, atom, second])
            case "dict":
                return {"first": first, atom: second}
            case "set":
                return {atom, 1, "a"}
            case "Point":
                return Point(first, [second, atom])
            case "Row":
                return with_attributes(Row([first, atom]), a=second)
            case "Count":
                return with_attributes(Count(3), a=first, b=atom)
            case "share":
                return [first, first]
            case "copy":
                return [first, deepcopy(first)]
        if isinstance(first, list):
            first.append(atom)
        return first


def written_out(value: Any) -> Any:
    """All of a value, each part as often as it is there: brute force."""
    cls = type(value)
    if isinstance(value, (set, frozenset)):
        return cls, sorted(str(written_out(part)) for part in value)
    parts: list[Any] = [written_out(getattr(value, "__dict__", None))] if cls in (Point, Row, Count) else []
    if isinstance(value, dict):
        return cls, [(written_out(key), written_out(part)) for key, part in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return cls, [written_out(part) for part in value], parts
    return cls, parts or repr(value)


@given(SHAPES, SHAPES)
def test_fingerprints_are_equal_where_values_are(one: Any, other: Any) -> None:
    """Of any two structures: so they are written out, by brute force, in the same way."""
    made = [Built(shape).value for shape in (one, one, other)]
    digests = [fingerprint(value) for value in made]
    assert digests[0] == digests[1] is not None
    assert (digests[1] == digests[2]) == (str(written_out(made[1])) == str(written_out(made[2])))


EDGES = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=12)


def _graph(edges: list[tuple[int, int]], labels: list[int]) -> list[Any]:
    nodes: list[list[Any]] = [[label] for label in labels]
    for start, end in edges:
        nodes[start].append(nodes[end])
    return nodes[0]


def _alike(one: list[Any], other: list[Any]) -> bool:
    """Whether all ways through two graphs meet the same labels: brute force."""
    seen: set[tuple[int, int]] = set()
    stack = [(one, other)]
    while stack:
        left, right = stack.pop()
        if (id(left), id(right)) not in seen:
            seen.add((id(left), id(right)))
            if left[0] != right[0] or len(left) != len(right):
                return False
            stack += zip(left[1:], right[1:], strict=True)
    return True


@given(EDGES, EDGES, st.lists(st.integers(0, 1), min_size=5, max_size=5))
def test_graphs_with_one_fingerprint_are_alike(one: Any, other: Any, labels: list[int]) -> None:
    """Of lists that contain each other and themselves, too; made again, a graph has the same."""
    left, right = _graph(one, labels), _graph(other, labels)
    assert fingerprint(left) == fingerprint(_graph(one, labels)) is not None
    assert _alike(left, right) or fingerprint(left) != fingerprint(right)
