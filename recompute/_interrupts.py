"""Interrupts: exceptions from the handlers of signals, which come at any line and belong to no code that runs there.

Python raises them in the middle of whatever the main thread does. So where an error of the user's class, adapter or
listener is survived, what a handler raised, which may be any Exception, has to pass through.
"""

from __future__ import annotations

import contextlib
from functools import partial
from inspect import CO_VARARGS
from traceback import walk_tb
from types import CodeType, FrameType, MethodType, TracebackType
from typing import Any


def is_interrupt(error: BaseException | None) -> bool:
    """Whether an error that was caught just now comes from the handler of a signal, or was raised because of one.

    A handler is known by what it gets: the frame in which it strikes. Or it is installed now, and written in Python.
    """
    while error is not None:
        outer: set[FrameType] = set()
        installed: set[CodeType] | None = None
        for frame, _ in walk_tb(error.__traceback__):
            if outer:  # the first one is that of who asks
                installed = _installed() if installed is None else installed
                if frame.f_code in installed or not outer.isdisjoint(_frames_given(frame)):
                    return True
            outer.add(frame)
        error = error.__cause__
    return False


def _frames_given(frame: FrameType) -> list[FrameType]:
    """Those among the arguments of a function, if there may be two of them."""
    code = frame.f_code
    count = code.co_argcount
    several = bool(code.co_flags & CO_VARARGS)
    if count < 2 and not several:
        return []
    if str(frame.f_globals.get("__name__")).startswith("recompute."):  # who asked for an operation
        return []
    found = frame.f_locals
    given = [found.get(name) for name in code.co_varnames[:count]]
    rest = found.get(code.co_varnames[count + code.co_kwonlyargcount]) if several else None
    return [frame for frame in (*given, *(rest if isinstance(rest, tuple) else ())) if isinstance(frame, FrameType)]


def _installed() -> set[CodeType]:
    import signal  # not before it is needed

    found: set[CodeType] = set()
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        while isinstance(handler, partial):
            handler = handler.func
        if callable(handler) and not hasattr(handler, "__code__") and not isinstance(handler, MethodType):
            handler = type(handler).__call__
        code = getattr(handler, "__code__", None)
        if isinstance(code, CodeType):
            found.add(code)
    return found


class suppress(contextlib.suppress):
    """As `contextlib.suppress`, but interrupts pass through."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return super().__exit__(kind, error, trace) and not is_interrupt(error)
