"""A program, run as Python itself would run it."""

from __future__ import annotations

import os
import pkgutil
import runpy
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType
from typing import Final

from recompute import BudgetError, ImpureError
from recompute._cli.output import CommandError, complain, flush, no_interrupt_lost, reader_gone, silence
from recompute._cli.recording import Script


@dataclass(frozen=True)
class Ending:
    """How a program ended."""

    status: int
    error: str | None = None
    """The error, in a few words."""
    ours: bool = False
    """Whether that was an error of the cache, which one line explains."""


def execute(program: Script) -> Ending:
    """Run `program` with `sys.argv`, `sys.path` and `__main__` of its own, and show what it raises.

    Raises CommandError if there is no such program.
    """
    others = set(threading.enumerate())
    with _stage(program), no_interrupt_lost():
        try:
            try:
                _start(program)
                ending = Ending(0)
            except BaseException as error:
                ending = _ending(program, error)
            _wait_for_threads(others)
            flush(sys.stdout)
        except KeyboardInterrupt:
            ending = Ending(130, "interrupted")
        except BrokenPipeError:
            silence(sys.stdout)
            ending = Ending(141, "broken pipe")
    return ending


def _wait_for_threads(others: set[threading.Thread]) -> None:
    """Wait as Python does at its exit. Not where there are pools: their threads are told to end only then."""
    while not getattr(threading, "_threading_atexits", True):
        running = [thread for thread in threading.enumerate() if thread not in others and not thread.daemon]
        if not running:
            return
        running[0].join()


def _start(program: Script) -> None:
    if program.module:
        runpy.run_module(program.name, run_name="__main__", alter_sys=True)
    elif pkgutil.get_importer(program.name) is not None:  # a folder or an archive with a __main__.py
        runpy.run_path(program.name, run_name="__main__")
    else:
        path = os.path.abspath(program.name)
        main = sys.modules["__main__"] = ModuleType("__main__")
        main.__loader__ = loader = SourceFileLoader("__main__", path)
        vars(main).update(__file__=path, __builtins__=sys.modules["builtins"])
        if sys.version_info < (3, 15):
            vars(main)["__cached__"] = None
        if sys.version_info < (3, 14):
            main.__annotations__ = {}
        code = loader.source_to_code(loader.get_data(path), path)
        exec(code, vars(main))


@contextmanager
def _stage(program: Script) -> Iterator[None]:
    """The interpreter's globals as the program expects them, and afterwards as they were."""
    argv, path, main = sys.argv, sys.path[:], sys.modules["__main__"]
    sys.argv = [program.name, *program.args]
    if not sys.flags.safe_path:  # which keeps the program's folder out
        folder = os.getcwd() if program.module else os.path.dirname(os.path.realpath(program.name))
        sys.path[:1] = [folder]
    try:
        yield
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = argv, path, main


def _ending(program: Script, error: BaseException) -> Ending:
    """Treat an exception that reaches the top as Python does."""
    if isinstance(error, SystemExit):
        return _exit(error.code)
    if isinstance(error, (BudgetError, ImpureError)):
        return Ending(complain(str(error), 1), f"{type(error).__name__}: {error}", ours=True)
    if isinstance(error, KeyboardInterrupt) or (isinstance(error, BrokenPipeError) and reader_gone(sys.stdout)):
        raise error
    trace = _own(error.__traceback__)
    if trace is None and isinstance(error, (ImportError, OSError)):  # it never started
        why = error.strerror if isinstance(error, OSError) else None
        raise CommandError(f"cannot run {program.name}: {why or error}") from None
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    return Ending(1, f"{type(error).__name__}: {error}")


def _exit(code: object) -> Ending:
    if code is None:
        return Ending(0)
    if isinstance(code, int):
        return Ending(int(code), f"exit status {code}" if code else None)
    print(code, file=sys.stderr)
    return Ending(1, str(code))


_RUNNERS: Final = (__name__, "runpy", "importlib._bootstrap", "importlib._bootstrap_external", "pkgutil")


def _own(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the program's first line on; None if it never came to that."""
    while trace is not None and trace.tb_frame.f_globals.get("__name__") in _RUNNERS:
        trace = trace.tb_next
    return trace
