"""Bytes of plain objects: all that hangs on one is counted once, wherever it is kept, and guesses are said to be."""

from __future__ import annotations

import array
import contextlib
import ctypes
import datetime
import decimal
import enum
import fractions
import functools
import io
import logging
import mmap
import pathlib
import re
import sys
import threading
import types
import uuid
import warnings
import weakref
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

import recompute as rc
from recompute._adapters import adapter as _adapter

MEGABYTE = 1_000_000
OVERHEAD = 2_000  # bytes that an object and its container may take themselves


class Plain:
    def __init__(self, part: object) -> None:
        self.part = part


class Slotted:
    __slots__ = ("_Slotted__secret", "part", "unset")

    def __init__(self, part: object) -> None:
        self.part = part


class SlotsBelow(Slotted):
    __slots__ = ()


class SlotsAndMore(Slotted):
    __slots__ = ("more",)

    def __init__(self, part: object) -> None:
        self.more = part


class SlotsAndDictionary(Slotted):
    def __init__(self, part: object) -> None:
        self.anything = part


class OneSlot:
    __slots__ = "part"

    def __init__(self, part: object) -> None:
        self.part = part


class Hidden(Slotted):
    """The slot of the base class is behind a property."""

    __slots__ = ()

    @property
    def part(self) -> None:  # type: ignore[override]
        """Nothing to see."""

    def __init__(self, part: object) -> None:
        Slotted.part.__set__(self, part)  # type: ignore[attr-defined]


@dataclass
class Data:
    part: object
    parts: list[object] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SlottedData:
    part: object


class Named(NamedTuple):
    part: object


class ListWithMore(list[Any]):
    def __init__(self, part: object) -> None:
        self.part = part


class DictionaryWithSlot(dict[Any, Any]):
    __slots__ = ("part",)

    def __init__(self, part: object) -> None:
        self.part = part


class LazyList(list[Any]):
    def __init__(self, part: object) -> None:
        super().__init__([part])

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("elements are not to be asked for in the class's own way")

    __len__ = __iter__  # type: ignore[assignment]


class CachedProperty(Plain):
    @functools.cached_property
    def twice(self) -> None:
        raise AssertionError("what is not computed yet is not computed to be measured")


class NoAttributes(Plain):
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


Pair = namedtuple("Pair", "part rest")

HOLDERS: dict[str, Callable[[Any], Any]] = {
    "list": lambda part: [part],
    "tuple": lambda part: (part, part),
    "dict": lambda part: {"key": part},
    "OrderedDict": lambda part: OrderedDict(key=part),
    "defaultdict": lambda part: defaultdict(list, key=part),
    "deque": lambda part: deque([part]),
    "ChainMap": lambda part: ChainMap({"key": part}),
    "UserDict": lambda part: UserDict(key=part),
    "UserList": lambda part: UserList([part]),
    "namedtuple": lambda part: Pair(part, None),
    "mappingproxy": lambda part: types.MappingProxyType({"key": part}),
    "values": lambda part: {"key": part}.values(),
    "SimpleNamespace": lambda part: types.SimpleNamespace(part=part),
    "partial": lambda part: functools.partial(print, part),
    "partial with keyword": lambda part: functools.partial(print, sep=part),
    "exception": lambda part: ValueError(part),
    **{
        cls.__name__: cls
        for cls in (
            *(Plain, Slotted, SlotsBelow, SlotsAndMore, SlotsAndDictionary, OneSlot, Hidden, Data, SlottedData, Named),
            *(ListWithMore, DictionaryWithSlot, LazyList, CachedProperty),
        )
    },
}
BLOBS = [bytearray(size) for size in (20_000, 300_000, 5_000_000)]


@pytest.mark.parametrize("name", HOLDERS)
def test_whatever_holds_a_part_counts_it(name: str) -> None:
    """Dictionaries, slots of any class, elements, fields in C: a part of a megabyte is a megabyte."""
    part = bytearray(MEGABYTE)
    assert MEGABYTE < rc.sizeof(HOLDERS[name](part)) < MEGABYTE + OVERHEAD
    assert MEGABYTE < rc.sizeof([HOLDERS[name](part), part]) < MEGABYTE + OVERHEAD


@given(st.data())
def test_parts_are_counted_once_however_they_are_nested(data: st.DataObject) -> None:
    """The size is that of the distinct blobs that can be reached, and some overhead for each object on the way."""
    names = data.draw(st.lists(st.sampled_from(sorted(HOLDERS)), min_size=1, max_size=6))
    reached: set[int] = set()
    value: Any = None
    for name in names:
        number = data.draw(st.integers(0, len(BLOBS) - 1))
        reached.add(number)
        value = HOLDERS[name]([BLOBS[number], value, BLOBS[number]])
    blobs = sum(sys.getsizeof(BLOBS[number]) for number in reached)
    assert blobs <= rc.sizeof(value) <= blobs + OVERHEAD * len(names)
    assert rc.sizeof(value) == rc.sizeof(value)


MEASURED: dict[str, Callable[[], Any]] = {
    "bytes": lambda: bytes(MEGABYTE),
    "bytearray": lambda: bytearray(MEGABYTE),
    "str": lambda: "x" * MEGABYTE,
    "memoryview": lambda: memoryview(bytearray(MEGABYTE)),
    "part of a memoryview": lambda: memoryview(bytearray(MEGABYTE))[:5],  # it keeps all of it
    "memoryview of an array": lambda: memoryview(array.array("d", bytes(MEGABYTE))),
    "mmap": lambda: mmap.mmap(-1, MEGABYTE),
    "array": lambda: array.array("b", bytes(MEGABYTE)),
    "ctypes array": lambda: (ctypes.c_char * MEGABYTE)(),
    "ctypes structure": lambda: type("Large", (ctypes.Structure,), {"_fields_": [("b", ctypes.c_char * MEGABYTE)]})(),
    "BytesIO": lambda: io.BytesIO(bytes(MEGABYTE)),
    "integer": lambda: 1 << 8 * MEGABYTE,
    "fraction": lambda: fractions.Fraction(1, 1 + (1 << 8 * MEGABYTE)),
    "decimal": lambda: decimal.Decimal((0, (1,) * 2_400_000, 0)),
}


@pytest.mark.parametrize("name", MEASURED)
def test_memory_that_python_can_see_is_counted(name: str) -> None:
    """Buffers, maps, numbers and text: about a megabyte each, alone and as a part."""
    value = MEASURED[name]()
    assert 0.99 * MEGABYTE < rc.sizeof(value) < 1.3 * MEGABYTE
    assert 0.99 * MEGABYTE < rc.sizeof([Slotted(value)]) < 1.3 * MEGABYTE


def test_text_in_memory_takes_four_bytes_a_character() -> None:
    """`io.StringIO` keeps code points, whatever `sys.getsizeof` says of it."""
    assert rc.sizeof(io.StringIO("x" * 1_000)) == 4_000


def test_what_was_closed_takes_nothing_more() -> None:
    """A closed map, and a released memoryview, are small and no error."""
    file = mmap.mmap(-1, MEGABYTE)
    file.close()
    view = memoryview(bytearray(MEGABYTE))
    view.release()
    assert rc.sizeof([file, view]) < OVERHEAD


class Color(enum.Enum):
    RED = bytearray(MEGABYTE)


@functools.lru_cache
def remembered(number: int) -> bytearray:
    """Has a cache of its own."""
    return bytearray(number)


SHARED: dict[str, Any] = {
    "function": lambda: 0,
    "method": [].append,
    "bound method": Plain(bytearray(MEGABYTE)).__init__,
    "cached function": remembered,
    "class": Plain,
    "class of a metaclass": Color,
    "enum member": Color.RED,
    "module": sys,
    "descriptor": Slotted.__dict__["part"],
    "weak reference": weakref.ref(Color),
}


@pytest.mark.parametrize("name", SHARED)
def test_what_belongs_to_everybody_is_not_counted(name: str) -> None:
    """Functions, classes, modules, members of enums: dropping a reference to one frees nothing."""
    remembered(MEGABYTE)
    assert rc.sizeof(SHARED[name]) == 0
    assert rc.sizeof([SHARED[name]]) == rc.sizeof([None])


SMALL: dict[str, Any] = {
    "object": object(),
    "datetime": datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC),
    "timedelta": datetime.timedelta(1),
    "Decimal": decimal.Decimal("1.5"),
    "Fraction": fractions.Fraction(1, 3),
    "UUID": uuid.UUID(int=1),
    "path": pathlib.PurePath("a/b"),
    "pattern": re.compile("a+"),
    "lock": threading.Lock(),
    "event": threading.Event(),
    "logger": logging.getLogger("recompute.tests"),
    "counter": Counter("a"),
    "complex": 1j,
    "slice": slice(1),
    "generic alias": list[int],
    "capsule": vars(datetime)["datetime_CAPI"],
    "context": contextlib.nullcontext(),
    "parts of the interpreter": [iter([]), {}.keys(), OrderedDict().items(), memoryview(b"")],
    "weak dictionary": weakref.WeakValueDictionary(),
    "exception with a traceback": None,
}


@pytest.mark.parametrize("name", SMALL)
def test_small_things_of_the_library_are_small(name: str) -> None:
    """No warning, and no walk to what they lead to: loggers to other loggers, exceptions to the frames they passed."""
    value = SMALL[name]
    if name.startswith("exception"):
        large = bytearray(MEGABYTE)
        try:
            raise ValueError("no")
        except ValueError as error:
            value = error
        del large
    assert 0 < rc.sizeof([value]) < 20_000


def test_handles_do_not_count_their_cache() -> None:
    """A value that refers to a Recomputable, or to a cache, is charged for the reference."""
    with rc.Cache() as cache:
        large = rc.ap(bytearray, MEGABYTE)
        assert rc.sizeof([large, cache]) < OVERHEAD
        assert rc.sizeof(Slotted(large)) < OVERHEAD


def test_cycles_and_long_chains_have_an_end() -> None:
    """What contains itself is counted once; a chain of 100,000 objects takes no recursion."""
    one, other = Slotted(None), Plain(None)
    one.part, other.part = [other, bytearray(MEGABYTE)], one
    assert MEGABYTE < rc.sizeof(one) < MEGABYTE + OVERHEAD
    chain: Any = None
    for _ in range(100_000):
        chain = OneSlot(chain)
    assert rc.sizeof(chain) == 100_000 * sys.getsizeof(chain)
    while chain is not None:  # a recursive destructor would overflow the stack of older interpreters
        chain = chain.part


# What types say of themselves


def claiming(**members: Any) -> Any:
    """An object with a part of 1 kB, whose class has these members."""
    return type("Claiming", (Plain,), members)(bytearray(1_000))


def fail(value: Any) -> int:
    raise RuntimeError("not now")


@pytest.mark.parametrize(
    "members",
    [
        {"nbytes": property(lambda value: MEGABYTE)},
        {"nbytes": lambda value: MEGABYTE},
        {"nbytes": MEGABYTE},
        {"nbytes": property(lambda value: float(MEGABYTE))},
        {"nbytes": functools.cached_property(lambda value: MEGABYTE)},
        {"estimated_size": lambda value: MEGABYTE},
        {"nbytes": property(fail), "estimated_size": lambda value: MEGABYTE},
        {"__sizeof__": lambda value: MEGABYTE - 16},
    ],
    ids=lambda members: f"{next(iter(members))} {type(next(iter(members.values()))).__name__}",
)
def test_a_type_may_say_how_large_its_values_are(members: dict[str, Any]) -> None:
    """`nbytes` or `estimated_size`, an attribute or a method, or a `__sizeof__` in Python."""
    value = claiming(**members)
    assert rc.sizeof(value) == pytest.approx(MEGABYTE, abs=50)  # `sys.getsizeof` adds a few bytes
    assert abs(rc.sizeof([value, value, claiming(**members)]) - 2 * MEGABYTE) < 200


SAYS_LITTLE: dict[str, dict[str, Any]] = {
    "too little": {"nbytes": property(lambda value: 8)},
    "less than nothing": {"nbytes": property(lambda value: -8)},
    "not a number": {"nbytes": property(lambda value: float("nan"))},
    "None": {"nbytes": property(lambda value: None)},
    "a word": {"nbytes": property(lambda value: "large")},
    "raises": {"nbytes": property(fail)},
    "a method that raises": {"nbytes": fail},
    "takes an argument": {"nbytes": lambda value, unit: MEGABYTE},
    "is missing": {"nbytes": property(lambda value: value.missing)},
    "an estimate that raises": {"estimated_size": fail},
    "a sizeof that raises": {"__sizeof__": fail},
    "a sizeof less than nothing": {"__sizeof__": lambda value: -1},
    "a Dask collection": {"nbytes": property(lambda value: MEGABYTE), "__dask_graph__": lambda value: {}},
}


@pytest.mark.parametrize("members", SAYS_LITTLE.values(), ids=SAYS_LITTLE)
def test_what_a_type_says_never_hides_its_parts(members: dict[str, Any]) -> None:
    """Too little, nonsense, an error, or the size of what is yet to be computed: then the parts are counted."""
    assert 1_000 < rc.sizeof(claiming(**members)) < 1_000 + OVERHEAD


def test_a_claim_beyond_all_memory_is_no_error() -> None:
    """A size that no float can hold counts as more than any budget."""
    assert rc.sizeof(claiming(nbytes=10**400)) >= sys.maxsize


def test_claims_inside_of_claims() -> None:
    """Each object counts what it says or what its parts take, whichever is more."""
    inner = claiming(nbytes=MEGABYTE)
    assert rc.sizeof(type("Outer", (Plain,), {"nbytes": 5})(inner)) == pytest.approx(MEGABYTE, abs=OVERHEAD)
    assert rc.sizeof(type("Outer", (Plain,), {"nbytes": 3 * MEGABYTE})([inner, inner])) == 3 * MEGABYTE


def test_a_registered_size_comes_first() -> None:
    """What the user says of a type is believed, also where it is a part."""
    cls = type("Registered", (Slotted,), {"nbytes": 5})
    rc.register_size(cls, lambda value: 7)
    assert rc.sizeof(cls(bytearray(100))) == 7
    assert rc.sizeof([cls(None)]) == sys.getsizeof([None]) + 7


# Guesses


@pytest.fixture
def first_guess() -> Iterator[None]:
    """As in a process that has guessed nothing yet."""
    before = set(_adapter._guesses)
    _adapter._guesses.clear()
    yield
    _adapter._guesses.update(before)


@pytest.mark.usefixtures("first_guess")
def test_a_guess_is_told_once_for_each_type() -> None:
    """What was not made in Python and says nothing of its size is named, with the remedy and the line it came from."""
    image = pytest.importorskip("PIL.Image", reason="the extra 'pillow' is not installed")
    opaque = [image.new("L", (1_000, 1_000)).im for _ in range(2)]
    with pytest.warns(rc.SizeWarning, match=r"the size of a ImagingCore is a guess: .*register_size\(I") as told:
        rc.sizeof(opaque[0])
    assert [warning.filename for warning in told] == [__file__]
    assert rc.sizeof(opaque[1]) < OVERHEAD


@pytest.mark.usefixtures("first_guess")
def test_the_part_whose_size_is_guessed_is_named_with_the_value() -> None:
    """The user knows the value that an operation returned, not what is inside of it."""
    image = pytest.importorskip("PIL.Image", reason="the extra 'pillow' is not installed")
    with (
        rc.Cache(),
        pytest.warns(rc.SizeWarning, match=r"ImagingCore, which is part of a .*\.Slotted,.*register_size\(.*\.Slotted"),
    ):
        rc.ap(lambda: Slotted(image.new("L", (1_000, 1_000)).im))


@pytest.mark.usefixtures("first_guess")
def test_what_says_how_large_it_is_is_no_guess() -> None:
    """Neither is a part of what says so, nor what was registered."""
    image = pytest.importorskip("PIL.Image", reason="the extra 'pillow' is not installed")
    core = image.new("L", (1_000, 1_000)).im
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rc.sizeof(type("Outer", (Plain,), {"nbytes": MEGABYTE})(core)) == MEGABYTE
        registered = type("Registered", (Plain,), {})
        rc.register_size(registered, lambda value: MEGABYTE)
        assert rc.sizeof(registered(core)) == MEGABYTE


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.booleans()), min_size=1, max_size=5), st.booleans())
def test_classes_of_the_program_are_never_guesses(steps: list[tuple[bool, int, bool]], exception: bool) -> None:
    """Slots, dictionaries and weak references in any order of inheritance: nothing is hidden, all parts are counted."""
    cls: type = Exception if exception else object
    names: list[str] = []
    for number, (slotted, count, mixed) in enumerate(steps):
        own = [f"slot_{number}_{place}" for place in range(count)] if slotted else []
        names += own or [f"attribute_{number}"] if not slotted else own
        mixin = (type("Mixin", (), {"__slots__": ()}),) if mixed else ()
        cls = type(f"Class{number}", (*mixin, cls), {"__slots__": tuple(own)} if slotted else {})
    value = cls()
    settable = [name for name in names if name.startswith("slot") or hasattr(value, "__dict__")]
    for name in settable:
        setattr(value, name, bytearray(50_000))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert 0 <= rc.sizeof(value) - 50_057 * len(settable) < OVERHEAD


# The cache


@pytest.mark.parametrize("name", ["Slotted", "SlottedData", "OneSlot", "ListWithMore", "partial"])
def test_the_budget_holds_for_values_of_every_class(name: str) -> None:
    """Sixty values of a megabyte within ten: the cache evicts, and each comes back."""
    with rc.Cache("10MB") as cache:
        values = [rc.ap(lambda number: HOLDERS[name](bytearray([number]) * MEGABYTE), number) for number in range(60)]
        assert cache.stats().used <= 10 * MEGABYTE
        assert cache.stats().evictions >= 50
        assert MEGABYTE < rc.sizeof(values[0].get()) < MEGABYTE + OVERHEAD


def test_verify_sees_what_is_in_slots() -> None:
    """Two values that differ in a slot have different digests, also where there is a dictionary, or elements."""
    for make in (Slotted, SlotsAndMore, ListWithMore, DictionaryWithSlot, SlottedData):
        digests = {rc.adapters.Adapter().fingerprint(make(bytearray([number]))) for number in (0, 0, 1)}
        assert None not in digests
        assert len(digests) == 2
    both = [SlotsAndDictionary(1), SlotsAndDictionary(1)]
    both[1].part = 2
    assert rc.adapters.Adapter().fingerprint(both[0]) != rc.adapters.Adapter().fingerprint(both[1])


def test_parts_that_are_made_while_they_are_measured() -> None:
    """Each is counted, though one may lie where another lay that has gone meanwhile."""

    class Made:
        def __getattribute__(self, name: str) -> Any:
            return {"content": [bytes(1_000)]} if name == "__dict__" else object.__getattribute__(self, name)

    assert rc.sizeof([Made() for _ in range(100)]) >= 100_000
