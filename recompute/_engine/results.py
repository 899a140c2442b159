"""Results: what an operation made, entered into the graph and into memory, the first time or again.

Where each output lives, on memory of its own or on what it shares, in which pool, and what that makes its storage cost.
`measure` asks the adapters, without the lock; everything else is bookkeeping under it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from threading import get_ident
from typing import Any

from recompute import _cython as cython
from recompute._adapters.adapter import Misfit, fingerprint, kinds
from recompute._adapters.result_sizes import MOST_BYTES, checked_size, sizeof_result
from recompute._engine.arguments import Outputs
from recompute._engine.events import Performed
from recompute._engine.functions import place_of
from recompute._engine.graph import Operation, Options, Reference, Storage, Value, copy_of, remains_of
from recompute._engine.journal import Journal
from recompute._engine.memory import Made, Memory, shared_storage
from recompute._engine.meter import Meter
from recompute._engine.pool import Pool
from recompute._engine.states import DROPPED, FORGOTTEN
from recompute._engine.verify import Fingerprints

if cython.compiled:
    import cython  # read by Cython, and never run
if not cython.compiled:

    def new_of(cls: Any) -> Any:  # compiled, without a search for `__new__`: see the .pxd
        return cls.__new__(cls)  # object.__new__ makes no extension type


Room = Sequence[tuple[Pool | str, int]]
"""Bytes that were reserved, by pool."""


class Results:
    """Measures outputs, and enters them."""

    __slots__ = ("_fingerprints", "_journal", "_memory", "_meter", "fragile", "number", "samples", "within")

    def __init__(self, memory: Memory, meter: Meter, journal: Journal, fingerprints: Fingerprints | None) -> None:
        self._memory = memory
        self._meter = meter
        self._journal = journal
        self._fingerprints = fingerprints
        self.samples: dict[Value, Hashable] = {}
        """Of sources: a source, and samples of what it held first."""
        self.within: set[Storage] = set()
        """Those whose memory may be in a container or an object made from them, and is counted once, for them."""
        self.number = 0
        """Of the newest value."""
        self.fragile = False
        """Whether there was a value whose memory others can give up."""

    # Without the lock

    def measure_all(self, operation: Operation, options: Options, result: Any) -> list[Made]:
        """Ask the adapters about what a function returned that has several outputs, or sizes that were declared."""
        if not options.nout:
            if type(result) is Outputs and len(result) == 1:
                (result,) = result
            options.nout = len(result) if type(result) is Outputs else 1
        declared = options.declared
        return [
            self.measure(operation, number, payload, None if declared is None else declared[number])
            for number, payload in enumerate(_outputs(operation, options.nout, result))
        ]

    def measure(self, operation: Operation, number: int, payload: Any, declared: int | None = None) -> Made:
        """Ask the adapter about one output."""
        kind = kinds.of(type(payload))
        if kind.readonce:
            raise TypeError(_no_result(operation, payload, payload))
        if kind.atomic and self._fingerprints is None:
            return payload, kind.nbytes(payload) if declared is None else declared, 0, "cpu", None, None
        arguments = operation.arguments
        taken = False
        for value in arguments:  # written out, as below: this is on the path of every operation
            if value.payload is payload:
                taken = True
        if kind.enter is not None and not taken:
            size, owner = kind.enter(payload)
            buffer = 0 if owner is None else id(owner)
            del owner
        else:
            try:
                shared: dict[int, Storage] = {}
                if not self._memory.counts_whole:
                    shared = {value.storage.buffer: value.storage for value in arguments if value.storage.buffer}
                within: set[int] | None = set() if shared else None
                size = sizeof_result(payload, shared, within)
                for owner in within or ():
                    self.within.add(shared[owner])
            except Misfit as found:
                raise TypeError(_no_result(operation, payload, found.part)) from None
            if kind.freeze is not None and not taken:  # else frozen when it was made, or a source: the caller's
                kind.freeze(payload)
            buffer = buffer_of(payload)  # last: nbytes and freeze may count references
        if type(size) is not int or not 0 <= size <= MOST_BYTES:  # mostly not, and without a call
            size = checked_size(size, payload)
        digest = None
        if self._fingerprints is not None:
            digest = fingerprint(payload)
            output = operation.outputs[number] if operation.runs else None
            if output is not None:
                self._fingerprints.check_repeated(operation, output, digest)
        device = "cpu" if kind.device is None else kind.device(payload)
        if kind.timer is not None and device != "cpu":
            self._meter.timers.setdefault(device, kind.timer)
        if kind.destroyed is not None:
            self.fragile = True
        shares = None
        if buffer:
            for value in arguments:
                if value.storage.buffer == buffer:
                    shares = value.storage
                    break
        return payload, size if declared is None else declared, buffer, device, digest, shares

    # Under the lock

    def add_source(
        self, payload: Any, size: int, buffer: int, device: str, digest: bytes | None, moves: bool = True
    ) -> Value:
        """A resident value without an operation; room was made for it. `moves`: it may lie in a tier."""
        memory = self._memory
        value = self._new_value(payload, None)
        storage = value.storage
        pool = memory.pool(device)
        if moves and pool.tiers is not None:
            remains_of(value).movable = True
        else:
            memory.machine.lock(storage)
        self._make_resident(storage, size, buffer, device)
        if self._fingerprints is not None:
            self._fingerprints.note(value, digest)
        memory.storages.add(storage)
        return value

    def _new_value(self, payload: Any, operation: Operation | None) -> Value:
        """A value on a storage of its own, which is not in memory yet."""
        value = Value()
        self.number = value.number = self.number + 1
        value.payload = payload
        value.operation = operation
        storage = value.storage = Storage(value.number)
        storage.values = (value,)
        return value

    def create(self, operation: Operation, made: list[Made], cost: float) -> None:
        """The outputs of a first run, each on the storage it shares or on one of its own."""
        operation.c0 = cost
        operation.runs = 1
        if len(made) == 1:
            payload, size, buffer, device, digest, shares = made[0]
            if shares is None or not shares.resident:  # nearly always
                value = self._new_value(payload, operation)
                storage = value.storage
                operation.number = value.number
                operation.outputs = storage.values  # type: ignore[assignment]  # one tuple for both
                storage.cost = cost
                self._make_resident(storage, size, buffer, device)
                self._memory.storages.add(storage)
                if self._fingerprints is not None:
                    self._fingerprints.note(value, digest)
                return
        now = self._meter.now
        outputs: list[Value] = []
        own: dict[int, Storage] = {}  # by buffer: outputs may share memory with each other
        paid: set[Storage] = set()  # they have the cost of the operation
        for payload, size, buffer, device, digest, shares in made:
            value = Value()
            self.number = value.number = self.number + 1
            value.operation = operation
            value.payload = payload
            joined = shares if shares is None or shares.resident else None
            if joined is None and buffer:
                joined = own.get(buffer)
                if joined is not None and size > joined.size:  # two views of what neither of them owns
                    self._resize(joined, size)
            if joined is None:
                storage = value.storage = Storage(value.number)
                storage.cost = cost
                storage.values = (value,)
                self._make_resident(storage, size, buffer, device)
                self._memory.storages.add(storage)
                if buffer:
                    own[buffer] = storage
            else:
                storage = joined
                self._join(value, operation, storage, storage not in paid)
            paid.add(storage)
            storage.last_access = now
            outputs.append(value)
            if self._fingerprints is not None:
                self._fingerprints.note(value, digest)
        if outputs:
            operation.number = outputs[0].number
        operation.outputs = outputs if len(outputs) > 1 else tuple(outputs)
        if operation.options is not None:
            operation.options.living = len(outputs)

    def _make_resident(self, storage: Storage, size: int, buffer: int, device: str, why: str = "made") -> None:
        memory = self._memory
        memory.machine.enter(storage, memory.pool(device), size, buffer, self._meter.now, why)

    def _resize(self, storage: Storage, size: int) -> None:
        self._memory.machine.resize(storage, size, sum([value.pinned for value in storage.values]))

    def restore(self, value: Value, operation: Operation, made: Made, why: str) -> None:
        """An evicted value was computed again; should it share memory otherwise than before, it moves."""
        payload, size, buffer, device, _, shares = made
        storage = value.storage
        if shares is not None and not shares.resident:
            shares = None  # evicted by another thread meanwhile
        if shares is None and buffer and len(operation.outputs) > 1:
            shares = shared_storage(operation.outputs, buffer)
            if shares is not None and size > shares.size:
                self._resize(shares, size)
        if shares is not None or storage.resident:
            if shares is None:
                shares = self.new_storage(storage)
                self._make_resident(shares, size, buffer, device, why)
            if shares is not storage:
                self.move(value, operation, shares)
        else:
            storage.held = None  # who still holds the old buffer is counted on his own
            last_access = storage.last_access
            self._make_resident(storage, size, buffer, device, why)
            storage.last_access = last_access
        value.payload = payload

    def new_storage(self, like: Storage) -> Storage:
        """A storage for a value that leaves the one it was on."""
        self.number += 1
        storage = Storage(self.number)
        storage.pool = like.pool
        storage.size = like.size
        storage.last_access = like.last_access
        self._memory.storages.add(storage)
        return storage

    def move(self, value: Value, operation: Operation, storage: Storage) -> None:
        """Let `value`, which lives on one storage, live on another."""
        memory = self._memory
        before = value.storage
        users = memory.neighbourhood.moving(value)
        if not before.resident:
            memory.neighbourhood.unlinking(before)
        self._join(value, operation, storage, not storage.is_made_by(operation, value))
        before.remove_value(value)  # not before it has a new place: an interrupt would leave it without one
        memory.machine.settle(storage)
        memory.machine.settle(before)
        if not before.values:
            self.forget_storage(before)
        else:
            if not before.is_made_by(operation, value):
                memory.add_cost(before, -operation.c0)
            if not before.resident and not before.dropped and copy_of(before) is None:
                memory.machine.move(before, DROPPED, "its copy is lost")  # the copy has gone with the value
        memory.neighbourhood.moved(users)

    def forget_storage(self, storage: Storage) -> None:
        """A storage has lost its last value."""
        memory = self._memory
        memory.storages.discard(storage)
        self.within.discard(storage)
        memory.machine.move(storage, FORGOTTEN, "nothing needs it")
        if storage.held is not None:
            storage.held.storage = None
            storage.held = None

    def _join(self, value: Value, operation: Operation, storage: Storage, costs: bool) -> None:
        """Let `value` live on `storage`, whose cost includes every operation that makes a value on it, once.

        `costs`: no other value there is made by the operation.
        """
        value.storage = storage
        if not storage.values:
            storage.cost += operation.c0
        elif costs:
            self._memory.add_cost(storage, operation.c0)
        storage.add_value(value)

    def reprice(self, operation: Operation, cost: float) -> None:
        """A repeated run was cheaper, or a device knows better: the cost changes."""
        change = cost - operation.c0
        operation.c0 = cost
        storages = {output.storage for output in operation.outputs if output is not None}
        for storage in storages:
            self._memory.add_cost(storage, change)

    def depend(self, operation: Operation, found: list[Value]) -> None:
        """Values that the function asked for at run time become arguments."""
        known = set(operation.arguments)
        new = [
            value
            for value in dict.fromkeys(found)
            if value not in known and value.storage in self._memory.storages and value in value.storage.values
        ]
        operation.arguments += tuple(new)
        for value in new:
            value.add_user(operation)

    def performed(
        self, operation: Operation, name: str, cost: float, again: bool, room: Room, sure: bool = True
    ) -> Performed:
        results = [output for output in operation.outputs if output is not None]
        storages = dict.fromkeys(output.storage for output in results)
        used = sum(pool.used for pool in {storage.pool for storage in storages})
        return Performed(
            self._meter.now,
            used,
            name,
            cost,
            again,
            tuple([storage.number for storage in storages]),
            tuple([storage.size for storage in storages]),
            tuple([argument.storage.number for argument in operation.arguments]),
            tuple([output.number for output in results]),
            tuple([output.storage.number for output in results]),
            tuple([argument.number for argument in operation.arguments]),
            next((storage.pool.device for storage in storages), "cpu"),
            None if self._memory.unlimited else sum([size for _, size in room]),
            sure,
            place_of(operation.code, operation.instruction),
            get_ident(),
        )


def buffer_of(payload: Any) -> int:
    """The identity of a payload's memory; 0: never shared. Asks its adapter."""
    kind = kinds.of(type(payload))
    owner = None if kind.buffer is None else kind.buffer(payload)
    return 0 if owner is None else id(owner)


def _outputs(operation: Operation, nout: int, result: Any) -> tuple[Any, ...]:
    if nout == 1:
        return (result,)
    try:
        outputs = tuple(result)
    except TypeError:
        outputs = ()
        what = f"a {type(result).__name__}"
    else:
        what = f"{len(outputs)} values"
    if len(outputs) != nout:
        raise ValueError(
            f"{operation.name} (created at {operation.created}) returned {what}, but nout={nout} outputs were announced"
        )
    return outputs


def _no_result(operation: Operation, payload: Any, part: Any) -> str:
    inside = "" if part is payload else f" with a {type(part).__name__} in it"
    returned = f"{operation.name} returned a {type(payload).__name__}{inside}"
    if hasattr(part, "__await__"):
        return (
            f"{returned}, which has not run yet, and can be awaited only once; let a function that is not async give "
            f"what it returns, such as lambda: asyncio.run(...) (created at {operation.created})"
        )
    if not kinds.of(type(part)).handle:
        return (
            f"{returned}, which can be read only once, but its result is kept and read again; return a list or a tuple "
            f"instead (created at {operation.created})"
        )
    return (
        f"{returned}, {part!r}, but it is the values that belong into a result: return handle.get(), which makes the "
        "value a dependency of the operation; or call the function itself instead of rc.ap, and join what it "
        f"returns by rc.sequence (created at {operation.created})"
    )


def _no_function() -> None:
    """Stands in for the function of what is no operation, or can no longer run: its data must not be kept."""


no_function: Callable[..., Any] = _no_function


def blank(cls: type[Any]) -> Any:
    """A new Recomputable that refers to nothing yet."""
    return new_of(cls)


def refer(cls: type[Any], engine: Any, value: Value | None, callback: Callable[[Reference], None]) -> Any:
    """A new Recomputable that refers to a value."""
    handle = new_of(cls)
    attach(handle, engine, value, callback)  # type: ignore[arg-type]  # the outputs of a first run are all there
    return handle


def attach(handle: Any, engine: Any, value: Value, callback: Callable[[Reference], None]) -> None:
    """Let a new Recomputable refer to a value."""
    handle._engine = engine
    handle._node = value
    if handle._reads_outline:
        value.outlined = True
    reference = Reference(handle, callback)
    if value.references is None:
        reference.value = value
        value.references = reference
    else:
        value.refer(reference)
