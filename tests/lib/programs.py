"""Programs as data: steps over a surface, small and printable, and the interpreter that says what can be observed.

A program means the same on every surface: steps speak of values by position among those not dropped, so they are
always valid, and a value that could not be made is lost without shifting the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import partial
from threading import Thread
from typing import Any, Final, Literal
from weakref import WeakSet

from lib.functions import FICKLE as FICKLE
from lib.functions import FUNCTIONS as FUNCTIONS
from lib.functions import inner
from lib.functions import numbers as numbers
from lib.vectors import vector
from recompute._cache import Cache
from recompute._errors import BudgetError
from recompute.testing._clock import ManualClock

Observation = tuple[Any, ...]
"""("value", shown), ("error", type, text), ("done",), or what only a cache does: ("short",), ("fault",), ("lost",)."""


class Injected(Exception):
    """The fault that a program asked for."""


# The steps


class Step:
    """One line of a program."""

    def __repr__(self) -> str:
        shown = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)  # type: ignore[arg-type]  # subclasses are dataclasses
            if getattr(self, field.name) != field.default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class Source(Step):
    """`pure` of a vector."""

    numbers: tuple[int, ...]
    device: str = "cpu"


@dataclass(frozen=True, repr=False)
class Apply(Step):
    """`ap` of one of `FUNCTIONS`.

    `how` the arguments are passed; in which run it raises a `fault` (0: never); at which values it `peeks` from
    inside, and `inside` what it does to them there; the `nbytes` that it declares; seconds that it takes on the clock.
    """

    function: str
    arguments: tuple[int, ...]
    how: Literal["plain", "list", "dict", "nested", "keyword", "applied"] = "plain"
    fault: int = 0
    peeks: tuple[int, ...] = ()
    inside: Literal["get", "evict", "apply"] = "get"
    nbytes: int | None = None
    cost: int = 1


@dataclass(frozen=True, repr=False)
class Gather(Step):
    """`sequence` of a list, a tuple or a dict; or `traverse`."""

    values: tuple[int, ...]
    how: Literal["list", "tuple", "dict", "iterator", "traverse"] = "list"


@dataclass(frozen=True, repr=False)
class Get(Step):
    value: int


@dataclass(frozen=True, repr=False)
class Hold(Step):
    """`get`, and keep what it gave."""

    value: int


@dataclass(frozen=True, repr=False)
class LetGo(Step):
    """Look at what is held once more, and drop it."""


@dataclass(frozen=True, repr=False)
class Pin(Step):
    value: int


@dataclass(frozen=True, repr=False)
class Unpin(Step):
    value: int


@dataclass(frozen=True, repr=False)
class Evict(Step):
    value: int


@dataclass(frozen=True, repr=False)
class Detach(Step):
    value: int


@dataclass(frozen=True, repr=False)
class Drop(Step):
    """Drop a handle."""

    value: int


@dataclass(frozen=True, repr=False)
class Budget(Step):
    """Set the budget to a share, in per cent, of the one at the start."""

    share: int


@dataclass(frozen=True, repr=False)
class ReleaseMemory(Step):
    nbytes: int | None = None
    device: str = "cpu"


@dataclass(frozen=True, repr=False)
class Together(Step):
    """`get` of several values, each in a thread of its own."""

    values: tuple[int, ...]


class Program(tuple[Step, ...]):
    """Steps, printed one to a line."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "Program([\n" + "".join(f"    {step!r},\n" for step in self) + "])"


# The interpreter


class Call:
    """One application of a function of `FUNCTIONS`: counts its runs, fails in one of them, peeks at other values."""

    __module__ = "recompute.testing"  # so that `verify` looks at it as at a function: its count of runs is no change
    __slots__ = ("__name__", "__weakref__", "clock", "peeks", "runs", "step", "surface")

    def __init__(self, step: Apply, peeks: Sequence[Any], surface: Any, clock: ManualClock | None) -> None:
        self.__name__ = step.function
        self.step = step
        self.peeks = peeks
        self.surface = surface
        self.clock = clock
        self.runs = 0

    def __reduce__(self) -> Any:
        raise TypeError("a call has no content to compare")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.runs += 1
        run = self.runs
        if self.clock is not None:
            self.clock.advance(self.step.cost)
        if run == self.step.fault:
            raise Injected(f"{self.__name__}, run {run}")
        parts = [*_leaves(args), *_leaves(kwargs)]
        for handle in self.peeks:
            if self.step.inside == "evict":
                handle.evict()
            if self.step.inside == "apply":
                handle = self.surface.ap(inner, handle)
            parts.append(handle.get())
        return FUNCTIONS[self.__name__][0](run, *parts)


def _leaves(part: Any) -> list[Any]:
    if isinstance(part, dict):
        part = list(part.values())
    if isinstance(part, (list, tuple)):
        return [leaf for value in part for leaf in _leaves(value)]
    return [part]


class Lost:
    """Stands for a value that could not be made."""


LOST: Final = Lost()


def observed(look: Callable[[], Observation], cache: Cache | None = None) -> Observation:
    """What a look at something gives, within a cache if there is one: if it fails, how."""
    try:
        with nullcontext() if cache is None else cache:
            return look()
    except Injected:
        return ("fault",)
    except BudgetError:
        return ("short",)
    except Exception as error:
        return ("error", type(error).__name__, str(error))


class Interpreter:
    """Runs steps over a surface: the module `recompute` (within `cache`), or `Identity`.

    With a `ManualClock` as the clock of the cache, every run is the same as the last.
    """

    def __init__(self, surface: Any, cache: Cache | None = None) -> None:
        self.surface = surface
        self.cache = cache
        clock = None if cache is None else cache._engine.meter.clock
        self._clock = clock if isinstance(clock, ManualClock) else None
        self._handles: list[Any] = []
        self._calls: WeakSet[Call] = WeakSet()
        self._held: list[tuple[Any, Any]] = []
        self._budget = cache.budget if cache is not None else None

    @property
    def roots(self) -> list[Any]:
        """The handles that are alive, those that functions hold included."""
        handles = [handle for handle in self._handles if handle is not None and handle is not LOST]
        return handles + [peek for call in list(self._calls) for peek in call.peeks]

    def do(self, step: Step) -> Observation:
        """One step, and what can be observed of it."""
        return observed(partial(self._do, step), self.cache)

    def finish(self) -> list[Observation]:
        """Without a budget, every value that is left: nothing may have been lost on the way."""
        if self.cache is not None:
            self.cache.budget = None
        self._held.clear()
        found: list[Observation] = []
        for position in range(len(self._handles)):
            if self._handles[position] is None:
                found.append(("dropped",))
                continue
            while (seen := self.do(_GetAt(position))) == ("fault",):
                pass  # each fault strikes once
            found.append(seen)
        return found

    def _do(self, step: Step) -> Observation:
        match step:
            case _GetAt(position):
                return self._got(self._handles[position])
            case Source(row, device):
                made: Any = LOST
                try:
                    made = self.surface.pure(vector(*row, device=device))
                finally:
                    self._handles.append(made)
            case Apply():
                return self._apply(step)
            case Gather(values, how):
                return self._gather(self._pick(*values), how)
            case Get(value):
                return self._got(*self._pick(value))
            case Hold(value):
                for handle in self._pick(value):
                    if handle is LOST:
                        return ("lost",)
                    payload = handle.get()
                    self._held.append((payload, show(payload)))
                    return ("value", show(payload))
            case LetGo():
                same = all(show(payload) == shown for payload, shown in self._held)
                self._held.clear()
                return ("held", same)
            case Budget(share):
                if isinstance(self._budget, int) and self.cache is not None:
                    self.cache.budget = max(1, self._budget * share // 100)
            case ReleaseMemory(nbytes, device):
                if self.cache is not None:
                    self.cache.release_memory(nbytes, device)
            case Together(values):
                return self._together(self._pick(*values))
            case Drop(value):
                live = [position for position, handle in enumerate(self._handles) if handle is not None]
                if live:
                    self._handles[live[value % len(live)]] = None
            case Pin(value) | Unpin(value) | Evict(value) | Detach(value):
                for handle in self._pick(value):
                    if handle is not LOST:
                        getattr(handle, type(step).__name__.lower())()
            case _:
                raise TypeError(f"{step!r} is not a step")
        return ("done",)

    def _pick(self, *references: int) -> list[Any]:
        """The handles at these positions among those not dropped."""
        live = [handle for handle in self._handles if handle is not None]
        return [live[reference % len(live)] for reference in references] if live else []

    def _got(self, *handles: Any) -> Observation:
        for handle in handles:
            return ("lost",) if handle is LOST else ("value", show(handle.get()))
        return ("done",)

    def _apply(self, step: Apply) -> Observation:
        nout = FUNCTIONS[step.function][1]
        made: Sequence[Any] = (LOST,) * nout
        try:
            handles, peeks = self._pick(*step.arguments), self._pick(*step.peeks)
            if LOST in handles or LOST in peeks:
                return ("lost",)
            args, kwargs = _arrange(handles, step.how)
            call = Call(step, peeks, self.surface, self._clock)
            self._calls.add(call)
            if step.how == "applied":
                made = self.surface.pure(call).apply(*args, nout=nout, nbytes=step.nbytes)
            else:
                made = self.surface.ap(call, *args, nout=nout, nbytes=step.nbytes, **kwargs)
            if nout == 1:
                made = (made,)
        finally:
            self._handles.extend(made)
        return ("done",)

    def _gather(self, handles: list[Any], how: str) -> Observation:
        made: Any = LOST
        try:
            if LOST in handles:
                return ("lost",)
            match how:
                case "tuple":
                    made = self.surface.sequence(tuple(handles))
                case "dict":
                    made = self.surface.sequence({str(key): handle for key, handle in enumerate(handles)})
                case "iterator":
                    made = self.surface.sequence(iter(handles))
                case "traverse":
                    made = self.surface.traverse(lambda value: value.map(inner), handles)
                case _:
                    made = self.surface.sequence(handles)
        finally:
            self._handles.append(made)
        return ("done",)

    def _together(self, handles: list[Any]) -> Observation:
        found: list[Observation] = [("lost",)] * len(handles)

        def get(position: int) -> None:
            try:
                found[position] = self._got(handles[position])
            except Injected:
                found[position] = ("fault",)
            except BudgetError:
                found[position] = ("short",)
            except Exception as error:
                found[position] = ("error", type(error).__name__, str(error))

        threads = [Thread(target=get, args=(position,), daemon=True) for position in range(len(handles))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "the threads have stopped each other"
        return ("together", *found)


@dataclass(frozen=True)
class _GetAt(Step):
    position: int


def _arrange(handles: list[Any], how: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    match how:
        case "list":
            return (handles,), {}
        case "dict":
            return (dict(enumerate(handles)),), {}
        case "nested":
            return ((tuple(handles[:1]), [handles[1:], 7], {"k": (5, None)}),), {}
        case "keyword":
            return tuple(handles[:1]), {f"k{key}": handle for key, handle in enumerate(handles[1:])}
        case _:
            return tuple(handles), {}


def show(payload: Any) -> Any:
    """A payload as something that can be compared and printed."""
    if isinstance(payload, (list, tuple)):
        return type(payload).__name__, *map(show, payload)
    if isinstance(payload, dict):
        return "dict", *((key, show(value)) for key, value in payload.items())
    if isinstance(payload, BaseException):
        return type(payload).__name__, *payload.args
    return repr(payload)


def run(
    program: Iterable[Step],
    surface: Any,
    cache: Cache | None = None,
    *,
    check: Callable[[Interpreter], None] | None = None,
) -> list[Observation]:
    """What can be observed of a program: of each step, then of what is left. `check` is called after each step."""
    interpreter = Interpreter(surface, cache)
    found: list[Observation] = []
    for step in program:
        found.append(interpreter.do(step))
        if check is not None:
            check(interpreter)
    found += interpreter.finish()
    if check is not None:
        check(interpreter)
    return found


def difference(expected: Sequence[Observation], actual: Sequence[Observation]) -> str | None:
    """Where a run under a cache differs from the identity's, if it does; running short and faults do not count.

    A value that could not be made is lost afterwards, and so is what would have been made of it.
    """
    if len(expected) != len(actual):
        return f"{len(expected)} observations expected, {len(actual)} made"
    for step, (wanted, got) in enumerate(zip(expected, actual, strict=True)):
        if wanted[0] == "together" == got[0]:
            inner = difference(wanted[1:], got[1:])
            if inner is not None:
                return f"step {step}: {inner}"
        elif got[0] not in ("short", "fault", "lost") and got != wanted:
            return f"step {step}: expected {wanted}, got {got}"
    return None
