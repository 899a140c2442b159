"""Runs: the function of an operation called, and what its outputs will need.

All of it without the lock: functions, clocks and adapters are the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any, Final

from recompute._adapters.adapter import kinds
from recompute._engine.arguments import as_they_were, fill, keywords_of
from recompute._engine.changes import Changes
from recompute._engine.frames import Frame, Here
from recompute._engine.graph import EVICTED, Operation
from recompute._engine.memory import Made, Memory
from recompute._engine.meter import Meter
from recompute._engine.randomness import drawing, turns
from recompute._engine.reachable import reached_by
from recompute._engine.results import Results
from recompute._engine.sizes import identity, known_by_code, size_hints
from recompute._engine.verify import Fingerprints, check_sources
from recompute._interrupts import is_interrupt

_NONE: Final[dict[str, Any]] = {}
_GUESS: Final = ("as it was recorded",)


class Runs:
    """Runs operations whose arguments are in memory, the first time or again."""

    __slots__ = ("_changes", "_fingerprints", "_memory", "_meter", "_results", "_room")

    def __init__(
        self,
        changes: Changes,
        memory: Memory,
        meter: Meter,
        results: Results,
        fingerprints: Fingerprints | None,
        room: Callable[[Any], tuple[Sequence[tuple[str, int]], bool]] | None,
    ) -> None:
        self._changes = changes
        self._memory = memory
        self._meter = meter
        self._results = results
        self._fingerprints = fingerprints
        self._room = room

    def expect(self, frame: Frame) -> None:
        """Find out how much room the outputs of a first run need, as far as that can be known. Without the lock.

        Asks adapters, and so does nothing while an argument is evicted.
        """
        operation = frame.operation
        assert operation is not None
        if operation.runs:
            return
        options = operation.options
        if frame.needs is not None:
            return
        if self._room is not None:
            frame.needs, sure = self._room(operation.function)
            frame.rough = None if sure else _GUESS
        elif options is not None and options.declared is not None:
            device = options.device
            if device is None:
                device = operation.arguments[0].storage.pool.device if operation.arguments else "cpu"
            frame.needs = [(device, size) for size in options.declared]
        elif self._memory.unlimited:
            frame.needs = ()
        else:
            for argument in operation.arguments:
                if argument.payload is EVICTED:
                    return
            sizes = self._memory.sizes
            function: Any = operation.function
            if size_hints(type(function)).alone:
                frame.key = function.size_key()
                frame.needs = sizes.get(frame.key, operation)
                if frame.needs is not None:
                    return
            payloads = (
                [argument.payload for argument in operation.arguments]
                if operation.positional is operation.arguments
                else fill(operation.positional, False)
            )
            keywords = None if options is None else keywords_of(operation)
            who = identity(function)
            frame.key = sizes.key(who, operation, payloads, keywords, True)
            frame.needs = sizes.get(frame.key, operation)
            if frame.needs is None:
                frame.rough = sizes.key(who, operation, payloads, keywords, False)
                frame.needs = sizes.guess(frame.rough)

    def is_sure(self, frame: Frame) -> bool:
        """Whether what was expected is not a guess. Its arguments are in memory."""
        operation = frame.operation
        assert operation is not None
        return frame.rough is None and (
            frame.key is None or known_by_code((operation.function, *fill(operation.positional)))
        )

    def run(self, frame: Frame, here: Here, outer: Frame | None) -> tuple[list[Made], float]:
        """Call the function: its outputs, measured, and its cost without what it spent elsewhere. Without the lock."""
        operation, meter = frame.operation, self._meter
        assert operation is not None
        if self._fingerprints is not None:
            for argument in operation.arguments:
                self._fingerprints.check_untouched(argument)
            self._fingerprints.check_plain(operation)
        options, arguments = operation.options, operation.arguments
        positional: Sequence[Any]
        named = _NONE
        if operation.positional is arguments:  # mostly, and quicker
            positional = [argument.payload for argument in arguments]
            if options is not None:
                named = keywords_of(operation, operation.runs > 0)
        elif operation.runs:
            positional, named = as_they_were(operation)
        else:
            positional = fill(operation.positional)
            if options is not None:
                named = keywords_of(operation)
        if operation.runs and self._results.samples:
            check_sources(self._results.samples, operation)
        again = _repeated(operation) if operation.runs else None
        timer = meter.start_timer(operation) if meter.timers else None
        if turns.lent:
            turns.take_back()
        function = operation.function
        reached = () if operation.runs else reached_by(operation)
        if reached or (options is not None and options.draws is not None):
            function = drawing(frame.engine, operation, reached)
        frame.outer = outer
        here.frame = frame
        start = meter.read()
        try:
            result = function(*positional, **named) if again is None else again(function, positional, named)
        except BaseException as error:
            note_creation(error, operation)
            raise
        finally:
            cost = meter.read() - start - frame.elsewhere
            here.frame = outer
        if not 0.0 <= cost < inf:
            cost = meter.checked(cost)
        if timer is not None and not frame.elsewhere:  # the device cannot tell what else was computed meanwhile
            frame.ask = timer()
        del positional, named, function
        if frame.found is not None:
            with self._changes.alone(), self._changes.begun():
                self._results.depend(operation, frame.found)
        if options is None:
            return [self._results.measure(operation, 0, result)], cost
        return self._results.measure_all(operation, options, result), cost


def note_creation(error: BaseException, operation: Operation) -> None:
    """Let an error say where the operation was created that raised it."""
    try:
        error.add_note(f"in {operation.name}, an operation created at {operation.created}")
    except Exception as forbidden:  # by its class, and the error itself matters more
        if is_interrupt(forbidden):
            raise


def _repeated(operation: Operation) -> Callable[..., Any] | None:
    """What calls the function of a repeated run on arrays of a library that would warn of the same again."""
    for value in operation.arguments:
        kind = kinds.of(type(value.payload))
        if kind.array is not None:
            return kind.array.repeated
    return None


def tell_restored(operation: Operation, made: list[Made]) -> None:
    """Let adapters put the memory of what was made again where it belongs. Without the lock."""
    for value, output in zip(operation.outputs, made, strict=True):
        if value is not None and value.payload is EVICTED and value.remains is not None:
            payload = output[0]
            restored = kinds.of(type(payload)).restored
            if restored is not None and value.remains.outline is not None:
                restored(value.remains.outline, payload)
