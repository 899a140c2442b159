"""Runs: one run of an operation, its function called, its outputs measured, then kept with what it cost.

The function and the adapters are called without the cache's lock; `_store` holds it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import CodeType
from typing import Any

from recompute._adapters.adapter import fingerprint, kinds
from recompute._budget import Limits
from recompute._engine.allocation import Allocation
from recompute._engine.arguments import Several, fill
from recompute._engine.frames import Frame, Made, running
from recompute._engine.graph import EVICTED, Operation, ReleaseMode, Storage
from recompute._engine.results import home_among, own_memory
from recompute._policy.formulas import Policy
from recompute._policy.search import Search


class Runs(Allocation):
    """Runs operations whose arguments are in memory, the first time or again."""

    def __init__(
        self,
        limits: Limits,
        policy: Policy,
        search: Search,
        release: ReleaseMode,
        clock: Callable[[], float],
        verify: bool,
    ) -> None:
        super().__init__(limits, policy, search, release, verify)
        self._clock = clock
        self._again: dict[CodeType | str, list[float]] = {}  # function -> [times, seconds]

    def _run(self, frame: Frame) -> tuple[list[Made], float]:
        """Call the function: its outputs, measured, and its cost without what it spent in the cache. Takes no lock."""
        operation = frame.operation
        assert operation is not None
        if self._fingerprints is not None:
            for argument in operation.arguments:
                self._fingerprints.check_untouched(argument)
        positional = fill(operation.positional)
        keywords = operation.keywords
        clock = self._clock
        outer = frame.outer = running.get()
        running.set(frame)
        timer = self._start_timer(operation) if self._timers else None
        start = clock()
        try:
            if operation.runs and (quiet := _quiet(operation)) is not None:
                named = {} if keywords is None else dict(zip(keywords, fill(keywords.values()), strict=True))
                with quiet:
                    result = operation.function(*positional, **named)
            elif keywords is None:
                result = operation.function(*positional)
            else:
                result = operation.function(*positional, **dict(zip(keywords, fill(keywords.values()), strict=True)))
        except BaseException as error:
            say_where(error, operation)
            raise
        finally:
            cost = clock() - start - frame.nested
            running.set(outer)
        if timer is not None and not frame.nested:  # the device cannot tell what else was computed meanwhile
            frame.ask = timer()
        if not operation.nout:
            if type(result) is Several and len(result) == 1:
                (result,) = result
            operation.nout = len(result) if type(result) is Several else 1
        if operation.nout == 1:
            made = [self._measure(operation, 0, result)]
        else:
            made = [self._measure(operation, number, each) for number, each in enumerate(_outputs(operation, result))]
        return made, cost if cost > 0 else 0.0

    def _measure(self, operation: Operation, number: int, payload: Any) -> Made:
        """Ask the adapter about one output. Without the lock."""
        kind = kinds[type(payload)]
        if kind.readonce:
            raise TypeError(
                f"{operation.name} returned a {type(payload).__name__}, which can be read only once, but its result "
                f"is kept and read again; return a list or a tuple instead (created at {operation.created})"
            )
        declared = operation.declared
        size = kind.nbytes(payload) if declared is None else declared[number]
        if kind.freeze is not None:
            for argument in operation.arguments:
                if payload is argument.payload:
                    break  # frozen when it was made, or a source, which is the caller's
            else:
                kind.freeze(payload)
        digest = None
        if self._fingerprints is not None:
            digest = fingerprint(payload)
            value = operation.outputs[number] if operation.runs else None
            if value is not None:
                self._fingerprints.check_repeated(operation, value, digest)
        device = "cpu" if kind.device is None else kind.device(payload)
        if kind.timer is not None and device != "cpu":
            self._timers.setdefault(device, kind.timer)
        buffer = None if kind.buffer is None else kind.buffer(payload)  # last: nbytes and freeze may count references
        return payload, size, 0 if buffer is None else id(buffer), device, digest

    def _store(self, frame: Frame, made: list[Made], cost: float) -> None:
        """Keep the outputs, record the cost, let the arguments go."""
        operation = frame.operation
        assert operation is not None
        again = operation.runs > 0
        if self._unknown_costs:
            self._learn_costs()
        if frame.ask is not None:
            self._unknown_costs.append((operation, cost, again, frame.ask))
        frame.running = False
        self._executing -= 1
        if frame.found:
            self._depend(operation, frame.found, again)
        homes: list[Storage | None] = []
        for each in made:
            home = home_among(operation.arguments, each[2]) if each[2] else None
            if home is not None and not home.locks:  # got at run time; making room must not evict it now
                frame.lock(home)
            homes.append(home)
        if operation.nout > 1:
            operation.room = own_memory(made, homes)
        reserved, frame.reserved = frame.reserved, ()
        self._make_room_now(reserved, operation, made, homes)
        self.now += cost
        operation.runs += 1
        if again:
            self._rematerializations += 1
            self._remat_time += cost
            key = getattr(operation.function, "__code__", None) or operation.name
            count = self._again.get(key)
            if count is None:
                count = self._again[key] = [0, 0.0]
            count[0] += 1
            count[1] += cost
            for number, value in enumerate(operation.outputs):
                if value is not None and value.payload is EVICTED:
                    self._restore(value, operation, made[number], homes[number])
            if cost < operation.cost and frame.ask is None:  # the first run of a compiled function is not its cost
                self._reprice(operation, cost)
        else:
            self._operations += 1
            operation.cost = cost
            self._create(operation, made, homes)
            if frame.key is not None:
                self._sizes.learn(frame.key, own_memory(made, homes))
        if self._listeners:
            self._events.append(self._performed(operation, cost, again, sum(size for _, size in reserved)))
        operation.frame = None
        self._unlock(frame)
        if self._banishable and again:
            for argument in operation.arguments:
                if argument.storage in self._banishable:
                    self._banish(argument.storage)
        if self._blocked:
            self._changed.notify_all()


def _quiet(operation: Operation) -> AbstractContextManager[Any] | None:
    """What surrounds a repeated run on arrays of a library that would warn of the same again."""
    for value in operation.arguments:
        adapter = kinds[type(value.payload)].array
        if adapter is not None:
            return adapter.repeated()
    return None


def _outputs(operation: Operation, result: Any) -> tuple[Any, ...]:
    if operation.nout == 1:
        return (result,)
    try:
        outputs = tuple(result)
    except TypeError:
        outputs = ()
        what = f"a {type(result).__name__}"
    else:
        what = f"{len(outputs)} values"
    if len(outputs) != operation.nout:
        raise ValueError(
            f"{operation.name} (created at {operation.created}) returned {what}, but nout={operation.nout} outputs "
            "were announced"
        )
    return outputs


def say_where(error: BaseException, operation: Operation) -> None:
    try:
        error.add_note(f"in {operation.name}, an operation created at {operation.created}")
    except Exception:  # an exception class may forbid it, and the error itself matters more
        return
