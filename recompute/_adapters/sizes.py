"""Sizes: how many bytes a plain Python object takes with all that it contains.

Where the instances of a class keep their parts, and what they tell of their own size, is found once for each class.
"""

from __future__ import annotations

import builtins
import datetime
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, ValuesView
from enum import Enum
from functools import lru_cache, partial
from gc import get_referents
from io import BytesIO, StringIO
from itertools import islice
from typing import Any, Final
from weakref import ReferenceType

from recompute._interrupts import is_interrupt

_POINTER: Final = object.__basicsize__ // 2  # bytes
_CLAIMS: Final = ("nbytes", "estimated_size")  # attributes or methods by which types say how large they are
_SHARED: Final[tuple[type, ...]] = (
    *(type, types.ModuleType, types.FrameType, types.TracebackType, types.CodeType),
    *(Enum, ReferenceType, type(lru_cache(max))),
)
_MACHINERY: Final = frozenset({"logging", "threading"})  # a logger leads to all other loggers
_CONTAINERS: Final = (list, tuple, dict, set, frozenset, deque)
_EXACT: Final = frozenset({*_CONTAINERS, defaultdict, OrderedDict})  # no attributes
_CAPSULE: Final = type(datetime.__dict__["datetime_CAPI"])  # a pointer, to what belongs to the object that lends it
_BUFFER: Final = type(get_referents(memoryview(b""))[0])
_UNNAMED: Final = (Iterator, KeysView, ValuesView, ItemsView, _CAPSULE, _BUFFER)  # parts of the language
_NAMED: Final = frozenset(
    cls for names in (vars(builtins), vars(types)) for cls in names.values() if isinstance(cls, type)
)


class Layout:
    """What a walk over an object has to know of the object's class."""

    __slots__ = ("_dict", "_slots", "claims", "container", "hidden", "native", "shallow", "shared", "structured")

    def __init__(self, cls: type) -> None:
        bases = cls.__mro__[:-1]
        native = [base for base in bases if base not in _CONTAINERS and not _explained(base)]
        inside = not _is_machinery(cls)
        self.shared = _is_shared(cls)
        """Functions, classes, enum members: they belong to everybody."""
        self.container = next((base for base in bases if base in _CONTAINERS), None) if inside else None
        """The builtin container that it is a subclass of."""
        self._dict = inside and cls not in _EXACT and cls.__dictoffset__ != 0
        self._slots = tuple(_slots(bases)) if inside else ()
        self.native = inside and bool(native) and not issubclass(cls, BytesIO)  # whose buffer is in its own size
        """Whether there are fields in C, of which some may refer to parts."""
        self.structured = self._dict or bool(self._slots) or self.native
        """Whether there are `attributes`."""
        self.claims = list(_claims(cls, native=bool(native))) if inside else []
        """How to ask an instance for its size with all that belongs to it."""
        self.shallow = next(method for method in _sizeofs(cls) if not isinstance(method, types.FunctionType))
        self.hidden = inside and _plain_sizeof(cls) and any(not _in_python_itself(base) for base in native)
        """Whether it was made in C, Rust, ... outside of Python, and may have memory that Python does not see."""

    def elements(self, value: Any) -> tuple[int, Iterable[Any]]:
        """How many elements a container has, and which, whatever its class makes of `__len__` and `__iter__`."""
        base: Any = self.container
        if base is dict:
            return 2 * dict.__len__(value), (part for item in dict.items(value) for part in item)
        return base.__len__(value), base.__iter__(value)

    def attributes(self, value: Any) -> list[Any]:
        """What the instance dictionary, the slots and fields in C refer to."""
        attributes = _dictionary(value) if self._dict else None
        found = [] if attributes is None else list(attributes.values())
        for slot in self._slots:
            try:
                found.append(slot.__get__(value))
            except AttributeError:  # not set
                continue
        if self.native:
            found += [part for part in get_referents(value) if part is not attributes]
        return found

    def state(self, value: Any) -> dict[str, Any]:
        """Instance dictionary and slots by name, slots with that of their class."""
        found = dict((_dictionary(value) if self._dict else None) or {})
        for slot in self._slots:
            try:
                found[f"{slot.__objclass__.__qualname__}.{slot.__name__}"] = slot.__get__(value)
            except AttributeError:
                continue
        return found

    def claimed(self, value: Any) -> int | None:
        """How many bytes the object says that it takes; None if it says nothing that makes sense."""
        for claim in self.claims:
            try:
                return max(0, min(int(claim(value)), sys.maxsize))
            except Exception as error:  # it is a property of the user's, or a buffer that was closed
                if is_interrupt(error):
                    raise
                if claim is _exported and isinstance(error, TypeError):
                    self.claims = [other for other in self.claims if other is not claim]  # the type has no buffer
        return None


class _Layouts(dict[type, Layout]):
    """Class -> Layout, found on first sight."""

    def __missing__(self, cls: type) -> Layout:
        layout = self[cls] = Layout(cls)
        return layout


layouts: Final = _Layouts()


def _is_shared(cls: type) -> bool:
    """Classes, modules and the like; functions, of whatever compiler, have a `__qualname__`."""
    return issubclass(cls, _SHARED) or any("__qualname__" in vars(base) for base in cls.__mro__)


def _is_machinery(cls: type) -> bool:
    """Whether instances lead to what is not theirs: handles to their whole cache."""
    return cls.__module__ in _MACHINERY or any(base.__module__.partition(".")[0] == "recompute" for base in cls.__mro__)


def _slots(bases: Iterable[type]) -> Iterator[types.MemberDescriptorType]:
    for base in bases:
        if "__slots__" in vars(base):
            yield from (member for member in vars(base).values() if type(member) is types.MemberDescriptorType)


def _explained(cls: type) -> bool:
    """Whether slots, a dictionary and weak references are all that instances have beyond those of the base class."""
    base = cls.__base__
    if base is None:
        return True
    pointers = len(list(_slots([cls])))
    pointers += cls.__weakrefoffset__ > 0 and base.__weakrefoffset__ == 0
    pointers += cls.__dictoffset__ != 0 and base.__dictoffset__ == 0
    return cls.__basicsize__ - base.__basicsize__ <= pointers * _POINTER


def _in_python_itself(cls: type) -> bool:
    """Whether a class belongs to the language or its library; many that do not say that they are from `builtins`."""
    package = cls.__module__.partition(".")[0]
    if package == "builtins":
        return cls in _NAMED or issubclass(cls, _UNNAMED)
    return package in sys.stdlib_module_names


def _sizeofs(cls: type) -> Iterator[Any]:
    """`sys.getsizeof`, or if that calls what was written in Python, that and what it overrides."""
    found = [vars(base)["__sizeof__"] for base in cls.__mro__ if "__sizeof__" in vars(base)]
    if isinstance(found[0], types.FunctionType):
        yield from found
    else:
        yield sys.getsizeof


def _plain_sizeof(cls: type) -> bool:
    """Whether no class says what instances have beyond their fields."""
    method: object = cls.__sizeof__
    return method is object.__sizeof__


def _claims(cls: type, *, native: bool) -> Iterator[Callable[[Any], Any]]:
    if not any("__dask_graph__" in vars(base) for base in cls.__mro__):  # what is yet to be computed has a size, too
        for name in _CLAIMS:
            if any(name in vars(base) for base in cls.__mro__):
                yield partial(_ask, name)
    if any(isinstance(method, types.FunctionType) for method in _sizeofs(cls)):
        yield sys.getsizeof  # written in Python: it is likely to look at the parts
    elif issubclass(cls, StringIO):
        yield lambda value: 4 * len(value.getvalue())
    elif native and _plain_sizeof(cls):
        yield _exported


def _ask(name: str, value: Any) -> Any:
    answer = getattr(value, name)
    return answer() if callable(answer) else answer


def _exported(value: Any) -> int:
    """Bytes of the buffer that the object lends out; TypeError if it has none."""
    with memoryview(value) as view:
        return view.nbytes


def _dictionary(value: Any) -> dict[str, Any] | None:
    try:
        attributes = value.__dict__
    except Exception as error:  # a proxy that points to nothing
        if is_interrupt(error):
            raise
        return None
    return attributes if type(attributes) is dict else None


def _shared(value: Any) -> int:
    """None, True, a function or a class belongs to everybody: dropping it frees nothing."""
    return 0


ATOMIC: Final[dict[type, Callable[[Any], int]]] = {
    **{cls: cls.__sizeof__ for cls in (int, float, complex, str, bytes, range)},
    slice: sys.getsizeof,  # which counts what the garbage collector adds
    **dict.fromkeys((type(None), bool, type(...), type(NotImplemented), type, types.ModuleType), _shared),
    **dict.fromkeys((types.FunctionType, types.BuiltinFunctionType, types.MethodType), _shared),
}
"""Types without parts; equal ones may be one object by accident, so identity means nothing. Type -> size in bytes."""

_SAMPLE: Final = 1_000  # elements of a container that are looked at; larger ones are extrapolated
_END: Final = object()  # on the stack below the parts of an object that says how large it is


def sizeof(
    value: Any, foreign: Callable[[type], Callable[[Any], int] | None], guessed: Callable[[Any, Any, int], None]
) -> int:
    """Bytes of an object and of what it contains, each part once; a container of more than 1,000 elements is sampled.

    An object that says how large it is (`nbytes`, `estimated_size`, a buffer) counts that, or its parts if they are
    more. `foreign` knows how to measure the types of a part that an adapter serves; `guessed` is told of a part, the
    value and the bytes that are counted where more may be hidden.
    """
    total = 0.0
    seen: dict[int, Any] = {}  # by identity, with the part, which must not die meanwhile
    claims: list[float] = []  # what `total` has to be at least, at each end of an object that says how large it is
    stack: list[tuple[Any, float]] = [(value, 1.0)]
    while stack:
        part, weight = stack.pop()
        measure = ATOMIC.get(type(part))
        if measure is not None:
            total += weight * measure(part)
            continue
        if part is _END:
            total = max(total, claims.pop())
            continue
        if id(part) in seen:
            continue
        seen[id(part)] = part
        measure = foreign(type(part))
        if measure is not None:
            total += weight * measure(part)
            continue
        layout = layouts[type(part)]
        if layout.shared:
            continue
        if layout.claims:
            claimed = layout.claimed(part)
            if claimed is not None:
                claims.append(total + weight * claimed)
                stack.append((_END, 0.0))
        try:
            size = layout.shallow(part)
        except Exception as error:  # the user's `__sizeof__`
            if is_interrupt(error):
                raise
            size = type(part).__basicsize__
        total += weight * size
        if layout.hidden and not claims:
            guessed(part, value, size)
        if layout.structured:
            stack.extend([(attribute, weight) for attribute in layout.attributes(part)])
        if layout.container is not None:
            count, elements = layout.elements(part)
            if count > _SAMPLE:
                elements, weight = islice(elements, 0, None, count // 100), weight * count / -(-count // (count // 100))
            stack.extend([(element, weight) for element in elements])
    return round(total)


def name_of(cls: type) -> str:
    """The class as a program refers to it."""
    return cls.__qualname__ if cls.__module__ in ("builtins", "__main__") else f"{cls.__module__}.{cls.__qualname__}"
