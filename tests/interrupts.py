"""Interrupts wherever one wants them: around functions, where Python looks for signals, at lines, or by a timer."""

from __future__ import annotations

import dis
import gc
import importlib
import pkgutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from inspect import isclass
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import pytest

import recompute as rc
from recompute import _form as form

COMPILED = form.name() == "compiled"
in_plain = pytest.mark.skipif(
    COMPILED, reason="compiled code has no lines between which a signal could come; CI runs this in the plain form, too"
)


def enough(places: int, plain: int, compiled: int | None = None) -> bool:
    """Whether a program passes more than so many places; compiled, a twentieth of them: those still in Python."""
    if not COMPILED:
        return places > plain
    least = plain // (20 if sys.version_info < (3, 14) else 30)  # later there are fewer in the same code
    return places > (least if compiled is None else compiled)


def strike() -> None:
    """What the handler of a signal does in the end."""
    raise KeyboardInterrupt


def delivered(cache: rc.Cache, errors: tuple[type[BaseException], ...] = (KeyboardInterrupt,)) -> None:
    """Let the next uses of the cache raise what destructors could not."""
    for _ in range(100):
        try:
            cache.stats()
        except errors:
            continue
        return
    raise AssertionError("an interrupt is raised again and again")


class Interrupts:
    """Strikes at the n-th crossing into or out of some functions; never before `arm` says which.

    Deterministic, unlike a timer, and safe, unlike a tracer. `strike` raises, or sends a signal.
    """

    def __init__(self, strike: Callable[[], None] = strike) -> None:
        self.crossings = 0
        self.where = ""  # it struck last
        self.strikes_at: tuple[int, ...] = ()
        self._strike = strike

    def arm(self, *crossings: int, strike: Callable[[], None] | None = None) -> None:
        """Count from 0 again, and strike at these crossings; 0: never."""
        self.crossings, self.strikes_at = 0, crossings
        self._strike = strike or self._strike

    @property
    def struck(self) -> bool:
        """Whether it has, since it was armed."""
        return any(self.crossings >= strike > 0 for strike in self.strikes_at)

    @contextmanager
    def on(self) -> Iterator[None]:
        """For those that do not strike everywhere in the process: where they do."""
        yield

    def let_in(
        self, monkeypatch: pytest.MonkeyPatch, holders: Iterable[Any], where: Callable[[FunctionType, str], bool]
    ) -> None:
        """At the functions that modules or classes hold by these names."""
        around: dict[FunctionType, Any] = {}  # one function may be held by several
        for holder in holders:
            for name, function in list(vars(holder).items()):
                if isinstance(function, FunctionType) and where(function, name):
                    around.setdefault(function, self._around(function))
                    monkeypatch.setattr(holder, name, around[function])

    def _around(self, function: FunctionType) -> Any:
        @wraps(function)
        def crossed(*args: Any, **kwargs: Any) -> Any:
            self._cross("entering", function.__code__)
            result = function(*args, **kwargs)
            self._cross("leaving", function.__code__)
            return result

        return crossed

    def _cross(self, place: Any, code: CodeType) -> None:
        self.crossings += 1
        if self.crossings in self.strikes_at:
            self.where = f"{code.co_filename}, {code.co_qualname}, {place}"
            self._strike()


class Tracing(Interrupts):
    """Strikes at the n-th place in some modules, inside of functions too, and of `except` and `finally`.

    A place is where Python looks for signals: where a function is entered, after a call, and where a loop begins anew.
    Or it is a `line`, but for the end of a `with`, between which and what it calls no signal can come.
    """

    def __init__(self, modules: Iterable[ModuleType], *, lines: bool = False) -> None:
        super().__init__()
        self._files = {module.__file__ for module in modules}
        self._lines = lines
        self._known: dict[CodeType, frozenset[int] | None] = {}

    @contextmanager
    def on(self) -> Iterator[None]:
        """Count and strike in here, in this thread."""
        before = sys.gettrace()
        if len(self.strikes_at) > 1:
            sys.setprofile(self._go_on)
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.setprofile(None)
            sys.settrace(before)

    def start(self) -> None:
        """Count and strike from here on, in this thread, until somebody sets another trace."""
        sys.settrace(self._enter)

    def _go_on(self, frame: FrameType, event: str, arg: Any) -> None:
        """Python ends a trace that has raised an error."""
        if sys.gettrace() is None:
            sys.settrace(self._enter)

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if code not in self._known:
            self._known[code] = self._places(code) if code.co_filename in self._files else None
        places = self._known[code]
        if places is None:
            return None
        frame.f_trace_opcodes = not self._lines
        frame.f_trace_lines = self._lines
        kind = "line" if self._lines else "opcode"

        def inside(frame: FrameType, event: str, arg: Any) -> Any:
            if event == kind and frame.f_lasti in places:
                self._cross(frame.f_lineno, code)
            return inside

        self._cross(frame.f_lineno, code)
        return inside

    def _places(self, code: CodeType) -> frozenset[int]:
        """Offsets in a function's code."""
        instructions = list(dis.get_instructions(code))
        if self._lines:
            ends = {
                first.offset
                for first, second, third in zip(instructions, instructions[1:], instructions[2:], strict=False)
                if all(
                    instruction.opname == "LOAD_CONST" and instruction.argval is None
                    for instruction in (first, second, third)
                )
            }
            return frozenset(instruction.offset for instruction in instructions) - ends
        after = {
            third.offset
            for first, second, third in zip(instructions, instructions[1:], instructions[2:], strict=False)
            if second.opname.startswith("CALL")
            and not second.opname.startswith("CALL_INTRINSIC")
            and first.opname != "LOAD_SPECIAL"  # a `with` begins: see recompute._locks
        }
        anew = {
            instruction.argval
            for instruction in instructions
            if instruction.opname.startswith("JUMP_BACKWARD") and not instruction.opname.endswith("NO_INTERRUPT")
        }
        return frozenset(after | anew)


def modules_in(*names: str) -> list[ModuleType]:
    """Modules by name; of a package, all that are in it."""
    found: list[ModuleType] = []
    for name in names:
        module = importlib.import_module(name)
        found.append(module)
        for submodule in pkgutil.iter_modules(getattr(module, "__path__", ()), name + "."):
            found += modules_in(submodule.name)
    return found


def holders_in(modules: Iterable[ModuleType]) -> list[Any]:
    """Modules, and the classes that are defined in them."""
    modules = list(modules)
    names = {module.__name__ for module in modules}
    classes = {
        var: None for module in modules for var in vars(module).values() if isclass(var) and var.__module__ in names
    }
    return [*modules, *classes]


class Storm:
    """Real signals, one every few `seconds`, whose handler raises wherever some modules are at work.

    For the main thread, which alone handles signals.
    """

    def __init__(self, modules: Iterable[ModuleType], error: type[BaseException], seconds: float) -> None:
        self.strikes = 0
        self._files = {module.__file__ for module in modules}
        self._error = error
        self._seconds = seconds

    @contextmanager
    def on(self) -> Iterator[None]:
        before = signal.signal(signal.SIGALRM, self._handle)
        signal.setitimer(signal.ITIMER_REAL, self._seconds, self._seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_filename in self._files:
                self.strikes += 1
                raise self._error
            frame = frame.f_back


def struck(work: Callable[[], object], times: int, seconds: float, error: type[BaseException]) -> Iterator[int]:
    """Do the work again and again until a real signal, whose handler raises, strikes in it; yields so many times."""

    def handle(number: int, frame: object) -> None:
        if armed:
            armed.clear()
            raise error

    armed: list[bool] = []
    before = signal.signal(signal.SIGALRM, handle)
    callbacks, gc.callbacks[:] = gc.callbacks[:], []  # what is raised in those of others reaches nobody
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        for number in range(times):
            with suppress(error):
                armed.append(True)
                while armed:
                    work()
            yield number
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        gc.callbacks[:] = callbacks
        signal.signal(signal.SIGALRM, before)
