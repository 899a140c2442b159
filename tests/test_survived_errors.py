"""Errors of somebody's code that the library survives: what the handler of a signal raised there passes through.

A handler may raise any Exception, at any line; it is not the fault of the code that it strikes.
"""

from __future__ import annotations

import importlib
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib.metadata import EntryPoint
from itertools import count
from pathlib import Path
from threading import Event, Thread
from types import FrameType, ModuleType
from typing import Any

import pytest

import recompute as rc
from interrupts import Tracing
from recompute._adapters import adapter as registry
from recompute._adapters.adapter import fingerprint
from recompute._arrays.writes import library_writes
from recompute._interrupts import is_interrupt
from recompute._staging.arguments import _Equal
from recompute.testing import check_invariants

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="there is no such signal on this system")

LONG = 60.0  # seconds: only a deadlock takes as long


class Late(TimeoutError):
    """What a handler for a time limit raises: an OSError, too."""


def strike() -> None:
    """A signal comes, here and now."""
    signal.raise_signal(signal.SIGALRM)


def raises(number: int, frame: FrameType | None) -> None:
    raise Late


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, raises)
    yield
    signal.signal(signal.SIGALRM, before)


# What is an interrupt


class Handler:
    def method(self, number: int, frame: FrameType | None) -> None:
        raise Late

    def __call__(self, *given: Any) -> None:
        raise Late


def resets(number: int, _: Any) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    raise Late


def looks(number: int, frame: FrameType | None) -> None:
    while frame is not None:
        frame = frame.f_back
    raise Late


def calls(number: int, frame: FrameType | None) -> None:
    looks(number, frame)


def later(what: str, number: int, frame: FrameType | None) -> None:
    raise Late(what)


HANDLERS: dict[str, Any] = {
    "function": raises,
    "method": Handler().method,
    "instance": Handler(),
    "partial": partial(later, "too late"),
    "lambda": lambda *given: later("too late", *given),
    "resets itself": resets,
    "looks around": looks,
    "calls another": calls,
}


def hidden() -> None:
    """Somebody's code that makes another error of every one."""
    try:
        strike()
    except Exception as error:
        raise ValueError("broken") from error


def caught(act: Callable[[], None]) -> Exception | None:
    try:
        act()
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("act", [strike, hidden])
@pytest.mark.parametrize("name", HANDLERS)
def test_an_interrupt_is_known_whatever_the_handler_is(name: str, act: Callable[[], None]) -> None:
    """By what handlers get, and by those that are installed."""
    signal.signal(signal.SIGALRM, HANDLERS[name])
    assert is_interrupt(caught(act))


@pytest.mark.parametrize("error", [Late("too late"), ValueError(1)])
def test_other_errors_are_no_interrupts(error: Exception) -> None:
    """Not even of the same type, or in the handling of one."""

    def broken(depth: int, other: Any) -> None:
        if depth:
            broken(depth - 1, other)
        raise error

    try:
        strike()
    except Late:
        found = caught(lambda: broken(20, None))
        assert found is error
        assert not is_interrupt(found)


@pytest.mark.parametrize("act", [partial(rc.ap, divmod, 1, 0), partial(rc.memoize(divmod), 1, 0)])
def test_an_error_of_an_operation_is_no_interrupt(act: Callable[[], None]) -> None:
    """What asks for an operation hands on the frame that it asked from, as handlers get one."""
    error = caught(act)
    assert isinstance(error, ZeroDivisionError)
    assert not is_interrupt(error)


# While an adapter is loaded

NUMBERS = count()


class PlugIn:
    """A framework with two types, and an adapter for them that is installed, but not loaded."""

    def __init__(self, folder: Path, text: str) -> None:
        self.name = f"framework_{next(NUMBERS)}"
        module = ModuleType(self.name)
        self.cls = type("Tensor", (), {"__module__": self.name})
        self.other = type("Other", (), {"__module__": self.name})
        module.Other = self.other  # type: ignore[attr-defined]  # on purpose
        sys.modules[self.name] = module
        self.module = ModuleType(f"adapter_of_{self.name}")  # as it will be
        path = folder / f"{self.module.__name__}.py"
        self.module.__file__ = str(path)
        path.write_text(text.replace("FRAMEWORK", self.name))
        importlib.invalidate_caches()
        point = EntryPoint(self.name, f"{self.module.__name__}:adapter", registry.GROUP)
        registry.installed()[self.name] = point  # to look for it in the file system would take tenths of a second

    def nbytes(self) -> int:
        """Of a value of the type: 12345 if the adapter says so."""
        return rc.sizeof(self.cls())


Install = Callable[[str], PlugIn]

ADAPTER = """
import recompute as rc

class Sized(rc.adapters.Adapter):
    name = "FRAMEWORK"

    def nbytes(self, value):
        return 12345

adapter = Sized()
"""
FAILS_ONCE = """
import FRAMEWORK
FRAMEWORK.tries = getattr(FRAMEWORK, "tries", 0) + 1
if FRAMEWORK.tries == 1:
    raise {}
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    monkeypatch.syspath_prepend(tmp_path)
    before = dict(registry.installed())
    yield lambda text: PlugIn(tmp_path, text)
    registry._entry_points = before


def test_an_interrupt_at_any_line_does_not_turn_an_adapter_off(install: Install) -> None:
    """It passes through, and the next use has the adapter; wherever in the registry and in the plug-in it strikes."""
    at, struck = 0, 1
    while struck:
        at += 1
        plug_in = install(ADAPTER)
        tracing = Tracing([registry, plug_in.module], lines=True)
        tracing.arm(at, strike=strike)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                with tracing.on():
                    plug_in.nbytes()
            except Late:
                pass
            else:
                assert not tracing.struck, tracing.where
            assert plug_in.nbytes() == 12345, tracing.where
        struck = tracing.struck
    assert at > 30


@pytest.mark.parametrize("error", ["Exception", "KeyboardInterrupt", "TimeoutError"])
def test_an_interrupt_that_shows_no_handler_is_known_by_a_second_try(install: Install, error: str) -> None:
    """As those that are raised from C, which Python code cannot tell from an error of the plug-in."""
    plug_in = install(FAILS_ONCE.format(error) + ADAPTER)
    with pytest.raises(BaseException) as raised:  # noqa: PT011  # of whatever type
        plug_in.nbytes()
    assert type(raised.value).__name__ == error
    assert plug_in.nbytes() == 12345


@pytest.mark.parametrize(
    "broken",
    ["import no_such_module", "raise RuntimeError('no driver')", "adapter = 7", "other = 7", "a syntax error"],
)
def test_a_broken_plug_in_is_said_once_and_left_out(install: Install, broken: str) -> None:
    """Also while an interrupt is handled; its values are plain Python objects."""
    plug_in = install(broken)
    try:
        strike()
    except Late:
        with pytest.warns(RuntimeWarning, match=f"the adapter '{plug_in.name}' cannot be loaded"):
            plug_in.nbytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plug_in.nbytes() < 12345


def test_a_plug_in_may_use_the_cache_while_it_is_imported(install: Install) -> None:
    """Its own values are plain objects until then, and only until then."""
    plug_in = install("import FRAMEWORK, recompute\nrecompute.sizeof(FRAMEWORK.Other())\n" + ADAPTER)
    assert plug_in.nbytes() == 12345
    assert rc.sizeof(plug_in.other()) == 12345


def test_threads_that_meet_a_framework_at_the_same_time_have_its_adapter(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One loads it, and the others wait."""
    gate = ModuleType("gate")
    gate.entered, gate.go = Event(), Event()  # type: ignore[attr-defined]  # on purpose
    monkeypatch.setitem(sys.modules, "gate", gate)
    plug_in = install(f"import gate\ngate.entered.set()\nassert gate.go.wait({LONG})\n" + ADAPTER)
    found: list[int] = []
    threads = [Thread(target=lambda: found.append(plug_in.nbytes())) for _ in range(2)]
    threads[0].start()
    assert gate.entered.wait(LONG)
    threads[1].start()
    while not found and not _imports(threads[1]):
        pass
    gate.go.set()
    for thread in threads:
        thread.join(LONG)
    assert [*found, plug_in.nbytes()] == [12345] * 3


def _imports(thread: Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if "importlib" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


# Elsewhere


class Once:
    """The first time that it is asked, a signal comes."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self) -> None:
        self.asked += 1
        if self.asked == 1:
            strike()


def class_that(hook: str, act: Callable[[], None], result: Callable[[Any], Any]) -> type:
    """A class of the program's with a method that acts."""

    def method(self: Any, *_: Any) -> Any:
        act()
        return result(self)

    return type("Foreign", (), {hook: method, "numbers": [1, 2]})


@pytest.mark.parametrize("hook", ["__sizeof__", "nbytes", "estimated_size"])
def test_while_an_object_says_its_size(hook: str) -> None:
    """The interrupt passes through, and the class is not said to have no size from then on."""
    value = class_that(hook, Once(), lambda _: 5_000)()
    with pytest.raises(Late):
        rc.sizeof(value)
    assert rc.sizeof(value) >= 5_000


def test_while_an_object_is_digested() -> None:
    """A value that could be compared is not left out."""
    value = class_that("__reduce__", Once(), lambda _: (list, ()))()
    with pytest.raises(Late):
        fingerprint(value)
    assert fingerprint(value) is not None


def test_while_an_argument_is_remembered() -> None:
    """An argument that could be copied is not passed on as it is."""

    class Numbers(list[int]):
        act = Once()

        def __copy__(self) -> Numbers:
            self.act()
            return Numbers(self)

    numbers = Numbers([1, 2])
    with rc.Cache() as cache:
        with pytest.raises(Late):
            rc.ap(sum, numbers)
        result = rc.ap(sum, numbers)
        numbers.append(3)
        result.evict()
        assert result.get() == 3
        check_invariants(cache, [result])


def test_while_an_argument_is_compared() -> None:
    """It is not said to be another argument than that of the example."""
    cls = class_that("__eq__", Once(), lambda _: True)
    constant = _Equal.now(cls())
    with pytest.raises(Late):
        constant.to(cls())
    assert constant.to(cls())


def test_while_a_listener_listens() -> None:
    """It hears of what comes later."""
    act, heard = Once(), []

    def listen(event: Any) -> None:
        heard.append(event)
        act()

    with rc.Cache() as cache:
        cache.subscribe(listen)
        with pytest.raises(Late):
            rc.pure(1)
        before = len(heard)
        value = rc.pure(2)
        assert len(heard) > before
        check_invariants(cache, [value])


class Written:
    """An array of a library that is asked whether its arrays can be written to."""

    act = Once()

    def __setitem__(self, key: Any, value: Any) -> None:
        self.act()


class WrittenAdapter(rc.adapters.ArrayAdapter):
    def empty(self, outline: Any) -> Written:
        return Written()


def test_while_a_library_is_asked_whether_it_writes() -> None:
    """Its arrays can be written to from then on, too."""
    rc.adapters.register(Written, WrittenAdapter())
    with pytest.raises(Late):
        library_writes(Written, None)
    assert library_writes(Written, None)


class Struck:
    """A value that is struck while it is packed, or unpacked."""

    def __init__(self, pack: Callable[[], None], unpack: Callable[[], None]) -> None:
        self.acts = pack, unpack
        self.content = b"a" * 50_000


class StruckAdapter(rc.adapters.Adapter):
    name = "struck"

    def nbytes(self, value: Struck) -> int:
        return len(value.content)

    def pack(self, value: Struck) -> Any:
        value.acts[0]()
        return value.acts, [value.content]

    def unpack(self, head: Any, load: Callable[[Any], None]) -> Struck:
        head[1]()
        load(bytearray(50_000))
        return Struck(*head)


@pytest.mark.parametrize("tier", [rc.Disk, partial(rc.Disk, always=True)])
def test_while_a_value_moves(tier: Callable[[], rc.Disk]) -> None:
    """The tier is not said to be full, nor to have lost what it has."""
    rc.adapters.register(Struck, StruckAdapter())
    with warnings.catch_warnings(), rc.Cache("1MB", tiers=[tier()]) as cache:
        warnings.simplefilter("error")
        source = rc.pure(Struck(Once(), Once()))
        with suppress(Late):
            source.evict()
        source.evict()
        assert not source.resident
        with pytest.raises(Late):
            source.get()
        assert source.get().content == b"a" * 50_000
        (found,) = cache.stats().tiers
        assert found.used == 50_000
        check_invariants(cache, [source])


def test_while_a_result_is_fetched() -> None:
    """Its copy is not lost."""
    rc.adapters.register(Struck, StruckAdapter())
    runs: list[int] = []

    def make() -> Struck:
        runs.append(1)
        return Struck(lambda: None, act)

    act = Once()
    with warnings.catch_warnings(), rc.Cache("1MB", tiers=[rc.Disk(always=True)]) as cache:
        warnings.simplefilter("error")
        value = rc.ap(make)
        assert value.evict()
        with pytest.raises(Late):
            value.get()
        assert value.get().content == b"a" * 50_000
        assert len(runs) == 1
        check_invariants(cache, [value])


def test_while_an_error_gets_its_note() -> None:
    """An error that takes no notes passes through, and so does an interrupt."""

    class Silent(Exception):
        act = Once()

        def add_note(self, note: str, /) -> None:
            self.act()
            raise TypeError("no notes")

    def fail() -> None:
        raise Silent

    with rc.Cache():
        with pytest.raises(Late):
            rc.ap(fail)
        with pytest.raises(Silent):
            rc.ap(fail)
