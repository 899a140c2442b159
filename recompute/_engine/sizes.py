"""Output sizes learnt per function and argument shapes, so that room is made before the second run.

Numbers among the arguments may decide a size (`zeros(n)`), but mostly they do not (a learning rate, the number of a
step): a call that differs from others in numbers only is expected to need the least that one of them needed. That is a
guess, and never a reason to refuse the call.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from types import CellType, FunctionType
from typing import Any, Final

from recompute._adapters.adapter import kinds
from recompute._engine.functions import Code, code_of, content, facts_of
from recompute._engine.graph import Operation

_MOST: Final = 4096  # entries; all are forgotten when there are more

Sizes = Sequence[tuple[str, int]]
"""(device, bytes) of the outputs that have memory of their own."""


class LearntSizes:
    """(function, shapes of its arguments) -> sizes of its outputs."""

    __slots__ = ("_sizes",)

    def __init__(self) -> None:
        self._sizes: dict[Hashable, Sizes] = {}

    def key(
        self,
        function: Hashable,
        operation: Operation,
        payloads: list[Any],
        keywords: dict[str, Any] | None,
        exact: bool,
    ) -> Hashable:
        """Under which the sizes of a call's outputs are filed; not `exact`: for all calls that differ in numbers only.

        `function`: its `identity`. O(arguments), and asks adapters.
        """
        nout = 1 if operation.options is None else operation.options.nout or 1
        if exact and len(payloads) == 1 and not keywords:  # mostly
            return function, nout, _nested(payloads[0], exact)
        key: list[Any] = [function, nout]
        if not exact:
            key.append(_ROUGH)
        for payload in payloads:
            key.append(_nested(payload, exact))
        if keywords:
            for name, payload in keywords.items():
                key.append((name, _nested(payload, exact)))
        return tuple(key)

    def get(self, key: Hashable, operation: Operation) -> Sizes | None:
        """What was learnt, or what the function itself says (`expect`); None if there is neither."""
        try:
            known = self._sizes.get(key)
            if known is None:
                function: Any = operation.function
                if not size_hints(type(function)).expects:
                    return None
                device = operation.arguments[0].storage.pool.device if operation.arguments else "cpu"
                known = function.expect(device)
                self._file(key, known)
            return known
        except TypeError:  # a signature that cannot be hashed
            return ()

    def guess(self, key: Hashable) -> Sizes:
        """The least that a call of this rough key needed, or nothing."""
        try:
            return self._sizes.get(key, ())
        except TypeError:
            return ()

    def learn(self, key: Hashable, sizes: Sizes, rough: Hashable = None) -> None:
        """What a call needed. `rough`: its rough key, if its own was new."""
        try:
            self._file(key, sizes)
            if rough is not None:
                known = self._sizes.get(rough)
                if known is None or _total(sizes) < _total(known):
                    self._file(rough, sizes)
        except TypeError:
            return

    def _file(self, key: Hashable, sizes: Sizes) -> None:
        if len(self._sizes) >= _MOST:
            self._sizes.clear()
        self._sizes[key] = sizes


_NESTED: Final = frozenset({list, tuple, dict})
_NUMBERS: Final = frozenset({int, float, complex})
_FEW: Final = 64  # of a longer container the length has to do
_PARTS: Final = 512  # of containers within each other that have more parts, too, and of those that are
_DEEP: Final = 16  # nested deeper
_ROUGH: Final = "rough"


def _nested(payload: Any, exact: bool) -> Hashable:
    """What decides the size of a result made from a payload: for a short container that of its parts."""
    cls: type = type(payload)
    kind = kinds.of(cls)
    if not exact or not kind.atomic:  # else it has no parts
        if cls in _NESTED:
            return _part(payload, exact, [_PARTS], _DEEP)
        if cls in _NUMBERS and not exact:
            return cls
    return payload if kind.signature is None else _signed(payload)


def _part(payload: Any, exact: bool, left: list[int], depth: int) -> Hashable:
    """The same of a part. `left`: how many more parts are looked at."""
    cls: type = type(payload)
    if cls in _NESTED:
        left[0] -= len(payload)
        if len(payload) > _FEW or left[0] < 0 or not depth:
            return cls, len(payload)
        parts = payload.items() if cls is dict else payload
        return cls, *[_part(part, exact, left, depth - 1) for part in parts]
    if cls in _NUMBERS and not exact:
        return cls
    return payload if kinds.of(cls).signature is None else _signed(payload)


def _signed(payload: Any) -> Hashable:
    """What its adapter says of it; of a function or a class, if that is nothing but its type, which one it is."""
    cls: type = type(payload)
    signature = kinds.of(cls).signature
    assert signature is not None
    found = signature(payload)
    return identity(payload) if found is cls and callable(payload) else found


def known_by_code(functions: Iterable[Any]) -> bool:
    """Whether all of these that can be called are known for what they do: of an object with `__call__` the class is."""
    for function in functions:
        if isinstance(getattr(type(function), "__call__", None), FunctionType):  # noqa: B004  # written in Python
            identity(function)
            if not _how[type(function)]:
                return False
    return True


def _total(sizes: Sizes) -> int:
    total = 0
    for _, size in sizes:
        total += size
    return total


def identity(function: Any) -> Hashable:
    """What stays the same when the same function is made again; never the function's own data, which must not leak."""
    cls: type = type(function)
    if cls is FunctionType:
        facts = facts_of(function)
        return _closed_over(facts.code, function.__closure__) if facts.closed else facts.code
    how = _how.get(cls)
    if how is None:
        how = _how[cls] = _known_by(cls, function)
    if how == "size_key":
        key: Hashable = function.size_key()  # of a function of the library's own
        return key
    if how == "func":  # functools.partial
        return identity(function.func), *map(constant, function.args), *map(constant, function.keywords.values())
    if how == "__wrapped__":  # a function that is compiled by a library
        return cls, identity(function.__wrapped__)
    if how == "__code__":
        code, cells = code_of(function.__code__), function.__closure__
        return _closed_over(code, cells) if cells else code
    return cls, type(getattr(function, "__self__", None)), getattr(function, "__name__", None)


class SizeHints:
    """What functions of one class say of the sizes of their results, see `Extension.run`."""

    __slots__ = ("alone", "expects")

    def __init__(self, cls: type) -> None:
        self.alone = bool(getattr(cls, "sizes_alone", False))
        self.expects = hasattr(cls, "expect")


def size_hints(cls: type) -> SizeHints:
    known = _hints.get(cls)
    if known is None:
        known = _hints[cls] = SizeHints(cls)
    return known


_hints: Final[dict[type, SizeHints]] = {}


def _known_by(cls: type, function: Any) -> str:
    for name in ("size_key", "func", "__code__"):
        if hasattr(cls, name):
            return name
    return "__wrapped__" if hasattr(function, "__wrapped__") else ""


_how: Final[dict[type, str]] = {}
"""Type of function -> the attribute by which it is known, if it has one."""


def _closed_over(code: Code, cells: tuple[CellType, ...]) -> Hashable:
    known: list[Hashable] = [code]
    for cell in cells:
        known.append(constant(content(cell, None)))  # None: not filled yet
    return tuple(known)


def constant(value: Any, depth: int = _DEEP) -> Hashable:
    """What a constant says about the size of a result: small ones count by value, others by type."""
    cls: type = type(value)
    if cls is tuple and depth:
        return tuple([constant(part, depth - 1) for part in value])
    if cls is slice:
        return constant((value.start, value.stop, value.step))
    return value if cls in (int, bool, float, str, type(None)) else cls
