"""Loads a build of the tracker, once in a process, and gives its functions their types."""

from __future__ import annotations

import ctypes
import logging
import os
from array import array
from collections.abc import Sequence
from ctypes import c_char_p, c_double, c_int, c_int64, c_void_p
from dataclasses import dataclass, fields
from typing import Any, Final

import torch

from recompute.extend import Recomputed, RLock
from recompute_torch._native.build import NotBuilt, Unavailable, build, check, compiler, place

VARIABLE: Final = "RECOMPUTE_TORCH_NATIVE"
"""Of the environment: 0 forbids the native path."""

_MAX_REPEATED: Final = 1 << 20  # bytes of the names and figures of all operators
_log: Final = logging.getLogger("recompute_torch")
_lock: Final = RLock()
_loaded: list[Any] = []

_FUNCTIONS: Final[dict[str, tuple[Any, list[Any]]]] = {
    "rm_raised": (ctypes.py_object, []),
    "rm_open": (
        c_int,
        [*[c_int64] * 3, c_int, c_int, ctypes.POINTER(c_double), c_int64, c_int, *[c_void_p] * 3],
    ),
    "rm_failure": (None, [c_char_p, c_int64]),
    "rm_close": (c_int, []),
    "rm_belongs_to_another": (None, [c_int64]),
    "rm_asked": (c_int64, []),
    "rm_take_part": (None, [c_int]),
    "rm_stepping": (None, [c_int]),
    "rm_set_budget": (c_int, [c_int64]),
    "rm_release": (c_int64, [c_int64]),
    "rm_keep": (c_int, [c_int64]),
    "rm_keep_all": (c_int, [c_void_p, c_int64]),
    "rm_commit": (c_int, []),
    "rm_state": (c_int, [c_int64]),
    "rm_figures": (None, [c_void_p]),
    "rm_repeated": (None, [c_char_p, c_int64]),
    "rm_needed": (c_int64, []),
    "rm_tightest": (None, [c_void_p, c_int64, c_void_p, c_char_p, c_int64]),
    "rm_next_lap": (None, []),
    "rm_height": (c_double, [c_double] * 4 + [c_int]),
    "rm_problems": (c_int64, []),
}


@dataclass(frozen=True)
class Figures:
    """What the tracker counts. Bytes, but for the numbers of operators and the like."""

    used: int
    peak: int
    lap: int
    overshoot: int
    operators: int
    evictions: int
    repeats: int
    values: int
    calls: int
    faults: int
    scored: int
    candidates: int
    evictable: int
    missing: int
    sources: int
    compute: float
    """Seconds of all operators."""
    repeated: float
    """Seconds of those that ran again."""


# Made once: ctypes would make a type for each call, which takes longer than the rest of it.
_Counted: Final[Any] = c_int64 * len(fields(Figures))
_Three: Final = c_int64 * 3
_Text: Final = ctypes.c_char * 2000


def library() -> Any:
    """The tracker's functions; it is built if it is not there. Raises Unavailable."""
    if os.environ.get(VARIABLE, "").lower() in ("0", "false", "no"):
        raise Unavailable(f"the environment forbids it: {VARIABLE}={os.environ[VARIABLE]}")
    with _lock:
        if not _loaded:
            path = place()
            if check(path) != "":
                compiler()  # or it is not said that it is built
                _log.warning(
                    "building what tracks PyTorch below Python, once for torch %s, in some 20 seconds (%s=0: without)",
                    *(torch.__version__, VARIABLE),
                )
                build()
            wrong = check(path)
            if wrong:
                raise NotBuilt(f"{path} is no use: {wrong}")
            try:
                torch.ops.load_library(str(path))
                functions = ctypes.CDLL(str(path))  # calls through it give up the interpreter's lock
            except OSError as error:
                raise NotBuilt(f"{path} does not load: {error}") from error
            for name, (result, arguments) in _FUNCTIONS.items():
                function = getattr(functions, name)
                function.restype, function.argtypes = result, arguments
            _loaded.append(functions)
        return _loaded[0]


_said: Final[set[str]] = set()


def say_once(reason: str, level: int = logging.INFO) -> None:
    """That the Python path serves instead, and why."""
    if reason not in _said:
        _said.add(reason)
        _log.log(level, "budget blocks run on the Python path: %s", reason)


open_block: Any = None
"""The native block that is open, or is about to be."""


def is_open() -> bool:
    """Whether one is, and a thread is in it."""
    return open_block is not None and bool(open_block._entrances)


def opened(block: object) -> None:
    """From now on it is."""
    global open_block
    open_block = block


def closed(block: object) -> None:
    """It no longer is; another one may be already."""
    if open_block is block:
        opened(None)


def has(storage: Any) -> bool:
    """Whether a storage belongs to the native block that is open."""
    return open_block is not None and bool(_loaded[0].rm_state(storage._cdata))


def belongs_to_another(storage: Any) -> None:
    """A block of the Python path has met a storage: the native one refuses it."""
    if open_block is not None:
        _loaded[0].rm_belongs_to_another(storage._cdata)


def asked() -> int:
    """The address of the storage of which the native block asks whether it belongs to another one."""
    return int(_loaded[0].rm_asked())


def figures(functions: Any) -> Figures:
    """What has been counted since the block was opened."""
    into: Any = _Counted()
    functions.rm_figures(into)
    return Figures(*into[:-2], *[nanoseconds / 1e9 for nanoseconds in into[-2:]])


def repeated(functions: Any) -> tuple[Recomputed, ...]:
    """The operators that ran again, those first that took longest."""
    text = ctypes.create_string_buffer(_MAX_REPEATED)
    functions.rm_repeated(text, _MAX_REPEATED)
    lines = [line.split("\t") for line in text.value.decode(errors="replace").splitlines()]
    runs = [Recomputed(name, int(times), float(seconds)) for name, times, seconds in lines]
    return tuple(sorted(runs, key=lambda run: -run.seconds))


def tightest(functions: Any, gradients: Sequence[int] = ()) -> tuple[int, int, int, str]:
    """Of the operator with the most in memory that could not be evicted: these bytes, its own of them, and its name.

    `gradients`: addresses of storages that could be evicted, and count as well where they were there. The third of the
    result is how many bytes of them that were.
    """
    into, name, addresses = _Three(), _Text(), array("q", gradients)
    functions.rm_tightest(addresses.buffer_info()[0], len(addresses), into, name, len(name))
    return *into, name.value.decode(errors="replace")


def ended(result: int) -> tuple[int, str]:
    """The result of a function that can fail, and the text of its error. Raises what a signal handler did."""
    if not result:
        return 0, ""
    if result == 3:
        raise _loaded[0].rm_raised()
    error = _Text()
    _loaded[0].rm_failure(error, len(error))
    return result, error.value.decode(errors="replace")
