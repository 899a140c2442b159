"""What the cache asks of a type of values, and the registry that finds who answers.

The core knows no framework by name. An adapter is found by the entry point group `recompute.adapters`, whose names are
top-level packages: the first value whose type comes from package `numpy` loads the entry point called `numpy`.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Iterator, Sequence
from functools import partial
from types import (
    AsyncGeneratorType,
    BuiltinFunctionType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    MethodType,
)
from typing import TYPE_CHECKING, Any, Final, cast

from recompute._adapters import packing as _packing
from recompute._adapters import python as _python
from recompute._adapters import remembering as _remembering
from recompute._adapters import sizes as _sizes
from recompute._adapters.generators import Generators, of_python
from recompute._adapters.kind import Kind, Kinds
from recompute._errors import SizeWarning
from recompute._interrupts import is_interrupt
from recompute.text import outside, warn

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from recompute._adapters.arrays import ArrayAdapter

GROUP: Final = "recompute.adapters"
FUNCTIONS: Final = frozenset({FunctionType, MethodType, BuiltinFunctionType, partial})
"""Types of functions that may be bound to something."""


class Adapter:
    """How the cache sees the values of one framework. Override what the framework knows better.

    The defaults serve plain Python objects. Methods must not keep a reference to the value, must not change it (but
    for `freeze`), and must not call into the cache. `recompute.testing.check_adapter` checks all of this.
    """

    name: str = "python"
    arrays: bool = False
    outlives: bool = False
    """Whether memory that `vacate` gives up stays when what refers to it goes, without a call of `outlive`."""

    def serves(self, cls: type) -> bool:
        """Whether values of this type are the adapter's business; others get the defaults."""
        return True

    def nbytes(self, value: Any) -> int:
        """The bytes that become free when the value goes, in O(1) where the framework allows."""
        return _sizes.sizeof(value, _foreign, guessed)

    def buffer(self, value: Any) -> object | None:
        """The object that stands for the memory: two values with the same one are aliases. None: never an alias."""
        return None if type(value) in _sizes.ATOMIC else value

    def watch(self, value: Any) -> object | None:
        """An object that lives as long as the memory and takes weak references; None where there is no such thing."""
        return value  # type: ignore[no-any-return]  # any object will do

    def device(self, value: Any) -> str:
        """The pool whose budget the value counts against: "cpu", "cuda:0", ..."""
        return "cpu"

    def freeze(self, value: Any) -> None:
        """Make the result of an operation read-only, if the framework can."""

    def enter(self, value: Any) -> tuple[int, object | None]:
        """`freeze`, then `nbytes` and `buffer`: all that is asked of a new result, in one step."""
        self.freeze(value)
        return self.nbytes(value), self.buffer(value)

    def evicted(self, value: Any) -> Any:
        """What remains of a value that is about to be dropped, and that may be asked for again; None: nothing."""
        return self.outline(value)

    def outline(self, value: Any) -> Any:
        """Shape, dtype and the like, which the Recomputable of an array tells when evicted: see `ArrayAdapter`."""
        return None

    def vacate(self, value: Any) -> None:
        """Give up the memory of a value that is dropped while it is referred to, if that lies elsewhere."""

    def outlive(self, value: Any) -> bool:
        """Have the memory stay when what refers to it goes, if it lies elsewhere; False if it cannot, or is gone."""
        return False

    def restored(self, remains: Any, value: Any) -> None:
        """A value was made again of which `evicted` had left `remains`."""

    def destroyed(self, value: Any) -> str | None:
        """Whether others have given up the memory of a value, and what to say of it; None: it is there, as ever.

        Such as "a float32[3], was deleted". Override it only where that can happen: it is asked before each use.
        """
        return None

    def signature(self, value: Any) -> Hashable:
        """What decides the size of a result made from the value: shape and dtype, for an array."""
        return _python.signature(value)

    def fingerprint(self, value: Any) -> bytes | None:
        """A digest of the content, equal for equal results; None: cannot be checked."""
        return _python.fingerprint(value, foreign_fingerprint)

    def sample(self, value: Any) -> Hashable | None:
        """Something that most changes of the content change, in O(1); None: it cannot change, or that cannot be seen.

        It is the same for an equal value that comes back from a tier, so there is no identity in it.
        """
        return _remembering.sample(value, _foreign_sample)

    def remember(self, value: Any) -> Callable[[], Any] | None:
        """What gives later runs of an operation a plain argument as it is now; None: as `sample`.

        The function that is returned raises ImpureError if that is not possible any more.
        """
        return _remembering.remember(value)

    def pack(self, value: Any) -> tuple[Any, Sequence[Any]]:
        """What to remember of a value, and its bytes as buffers, without a copy if possible: it goes to a tier.

        Raises whatever says that it cannot be packed so that it comes back the same: then it stays, or is recomputed.
        By default pickle, protocol 5, with out-of-band buffers; parts whose adapters override this are left to them.
        """
        return _packing.pack(value, _packer_of)

    def unpack(self, head: Any, load: Callable[[Any], None]) -> Any:
        """A value, equal to the last bit, of what `pack` gave: `load(memory)` fills memory with the next buffer."""
        return _packing.unpack(head, load)

    def generators(self) -> Generators | None:
        """How the framework's generators of random numbers are saved and set again; None: it has none."""
        return None

    def timer(self, device: str) -> Callable[[], Callable[[], float | None]] | None:
        """Begin to time an operation on the device, without waiting for it.

        Returns a function to call when the operation has been launched; that returns a function which gives the
        seconds once they are known, and None before. None: what runs there is timed by the cache's clock.
        """
        return None

    def devices(self) -> list[str]:
        """The devices that can be seen, for `recompute doctor`."""
        return ["cpu"]

    def remark(self) -> str:
        """What else `recompute doctor` says of it, in a line; empty: nothing."""
        return ""

    def free_memory(self, device: str) -> int | None:
        """Free bytes on the device; None: unknown."""
        return None

    def __repr__(self) -> str:
        return f"<adapter {self.name}>"


def _kind_of(adapter: Adapter, cls: type) -> Kind:
    """What the adapter has to say of values of one type."""
    own = type(adapter)
    kind = Kind()
    kind.adapter = adapter
    kind.nbytes = adapter.nbytes
    kind.part_of_result = adapter.nbytes if own.nbytes is not Adapter.nbytes else None
    kind.signature = adapter.signature
    kind.buffer = adapter.buffer
    kind.device = adapter.device if own.device is not Adapter.device else None
    kind.timer = adapter.timer if own.timer is not Adapter.timer else None
    kind.freeze = adapter.freeze if own.freeze is not Adapter.freeze else None
    kind.watch = adapter.watch if own.watch is not Adapter.watch or cls.__weakrefoffset__ else None
    kind.array = cast("ArrayAdapter", adapter) if adapter.arrays else None
    told, outlined = own.evicted is not Adapter.evicted, own.outline is not Adapter.outline
    kind.evicted = adapter.evicted if told or outlined else None
    kind.destroyed = adapter.destroyed if own.destroyed is not Adapter.destroyed else None
    kind.vacate = adapter.vacate if own.vacate is not Adapter.vacate else None
    kind.outlive = None if kind.vacate is None or adapter.outlives else adapter.outlive
    kind.restored = adapter.restored if own.restored is not Adapter.restored else None
    kind.silent = kind.evicted is None and kind.vacate is None
    kind.outlines = outlined and not told and kind.vacate is None and kind.restored is None
    kind.inert = 0
    kind.content = adapter.arrays or issubclass(cls, _remembering.PLAIN)
    kind.readonce = issubclass(cls, (Iterator, AsyncIterator, Coroutine))
    kind.handle = hasattr(cls, "_is_recomputable")
    if kind.handle or cls in _READ_ONCE:
        kind.part_of_result = _refuse
    kind.enter = None if own.enter is Adapter.enter or kind.readonce else adapter.enter
    own_way = own.remember is not Adapter.remember or own.sample is not Adapter.sample
    fixed = cls in _sizes.ATOMIC or not (own_way or _remembering.may_change(cls))
    kind.remember = None if fixed else adapter.remember
    kind.plain = fixed and not (kind.readonce or kind.handle or issubclass(cls, tuple)) and cls not in FUNCTIONS
    kind.atomic = own.nbytes is Adapter.nbytes and cls in _sizes.ATOMIC
    if kind.atomic:
        kind.nbytes = _sizes.ATOMIC[cls]
        kind.buffer = kind.watch = None
        if cls in _python.BY_VALUE:
            kind.signature = None
    return kind


_default = Adapter()
_registered: dict[type, Adapter] = {}
_entry_points: dict[str, EntryPoint] | None = None
_loaded: dict[str, Adapter | None] = {}
kinds: Final = Kinds(lambda cls: _resolved(cls))


def _resolved(cls: type) -> tuple[Kind, bool]:
    """What to ask of a type, and whether that will stay so: else the next one that asks may find its adapter."""
    adapter = _find(cls)
    return _kind_of(adapter or _default, cls), adapter is not None


def register(cls: type, adapter: Adapter) -> None:
    """Let `adapter` serve values of type `cls` and of its subclasses, before any entry point."""
    if not isinstance(cls, type):
        raise TypeError(f"register takes a type first, not {cls!r}")
    if not isinstance(adapter, Adapter):
        raise TypeError(f"register takes an instance of recompute.adapters.Adapter, not {adapter!r}")
    _registered[cls] = adapter
    kinds.clear()


def register_size(cls: type, nbytes: Callable[[Any], int]) -> None:
    """Let `nbytes(value)` say how many bytes a value of type `cls` takes; the rest as for plain Python objects."""
    adapter = type("SizeAdapter", (Adapter,), {"name": cls.__qualname__, "nbytes": lambda _, value: nbytes(value)})()
    register(cls, adapter)


def adapter_for(value: Any) -> Adapter:
    """The adapter that serves this value."""
    return kinds[type(value)].adapter


def sizeof(value: Any) -> int:
    """The bytes that the cache counts for this value."""
    return kinds[type(value)].nbytes(value)


class Misfit(TypeError):
    """There is something in the result of an operation that cannot be kept: a Recomputable, or a generator."""

    def __init__(self, part: Any) -> None:
        super().__init__(f"a part of a result cannot be kept: {part!r}")
        self.part = part


def _refuse(part: Any) -> int:
    raise Misfit(part)


_READ_ONCE: Final = frozenset({GeneratorType, AsyncGeneratorType, CoroutineType, map, filter, zip, enumerate, reversed})
"""What a function may return by mistake, also inside of something else."""


def _foreign(cls: type) -> Callable[[Any], int] | None:
    """How to measure a type that is not a plain Python one."""
    kind = kinds[cls]
    return None if type(kind.adapter).nbytes is Adapter.nbytes else kind.nbytes


def guessed(part: Any, value: Any, nbytes: int) -> None:
    """Warn, once for each type, that there may be more to a part of the value than the bytes that are counted.

    Not of types from a package that has an adapter, which knows those that are large.
    """
    cls = type(part)
    if cls in _guesses or cls.__module__.partition(".")[0] in installed():
        return
    _guesses.add(cls)
    known, whole = _sizes.name_of(cls), _sizes.name_of(type(value))
    inside = "" if part is value else f", which is part of a {whole},"
    warn(
        f"the size of a {known}{inside} is a guess: it is counted as {nbytes} bytes, but was not made in Python and "
        f"may have more memory; say how much with rc.register_size({whole}, lambda value: ...), or with an adapter "
        f"(rc.adapters.register)",
        SizeWarning,
        stacklevel=outside(),
    )


_guesses: Final[set[type]] = set()
"""Types that were warned of."""


def foreign_fingerprint(cls: type) -> Callable[[Any], bytes | None] | None:
    """How to digest a type that is not a plain Python one."""
    adapter = kinds[cls].adapter
    return None if type(adapter).fingerprint is Adapter.fingerprint else adapter.fingerprint


def _foreign_sample(cls: type) -> Callable[[Any], Hashable] | None:
    """How to look at a part of a type that is not plain Python: of an array on a device its shape is seen, no more."""
    adapter = kinds[cls].adapter
    own = type(adapter)
    if own.sample is Adapter.sample and own.signature is Adapter.signature:
        return None
    return lambda part: (
        adapter.signature(part),
        adapter.sample(part),
        adapter.fingerprint(part) if adapter.buffer(part) is None else None,  # a scalar, which can only be exchanged
    )


def _packer_of(part: Any) -> Adapter | None:
    """Who has a way of its own to pack a part of a value that has memory of its own."""
    adapter = kinds[type(part)].adapter
    own = type(adapter).pack is not Adapter.pack and adapter.buffer(part) is not None
    return adapter if own else None


def fingerprint(value: Any) -> bytes | None:
    """The digest that `Cache(verify=True)` compares; None where the value cannot be checked."""
    return kinds[type(value)].adapter.fingerprint(value)


def known_devices() -> list[str] | None:
    """The devices that adapters know which are at work already; None if one of them does not say."""
    found = dict.fromkeys(["cpu"])
    for adapter in {*_registered.values(), *filter(None, _loaded.values())}:
        own = type(adapter)
        if own.device is not Adapter.device and own.devices is Adapter.devices:
            return None
        found.update(dict.fromkeys(adapter.devices()))
    return list(found)


def installed() -> dict[str, EntryPoint]:
    """The entry points by name; scanned once, when first asked for. Of two with one name the first by value serves."""
    global _entry_points
    if _entry_points is None:
        from importlib.metadata import entry_points  # tens of milliseconds: not before it is needed

        found: dict[str, EntryPoint] = {}
        for point in sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value)):
            if found.setdefault(point.name, point).value != point.value:
                warn(
                    f"two adapters are installed for {point.name!r}: {found[point.name].value} is used, "
                    f"{point.value} is not; uninstall one of them",
                    RuntimeWarning,
                    stacklevel=2,
                )
        _entry_points = found
    return _entry_points


def load(name: str) -> Adapter | None:
    """The adapter of entry point `name`; None, with a warning, if it cannot be loaded.

    What the handler of a signal raises meanwhile passes through, and the next use tries again.
    """
    if name not in _loaded:
        try:
            _loaded[name] = _load(name)
        except Exception as error:  # a broken plug-in must not break the program
            again = None if is_interrupt(error) else _fails_again(name)
            if again is None:  # it is not broken
                raise
            _loaded[name] = None
            warn(
                f"the adapter {name!r} cannot be loaded ({again}); its values are treated as plain Python objects",
                RuntimeWarning,
                stacklevel=2,
            )
    return _loaded[name]


def _load(name: str) -> Adapter:
    adapter = installed()[name].load()
    if not isinstance(adapter, Adapter):
        raise TypeError(f"{adapter!r} is not an instance of recompute.adapters.Adapter")
    return adapter


def _fails_again(name: str) -> str | None:
    """What keeps an adapter from being loaded; None: nothing does, so that what came before was an interrupt.

    Not all of these are known for what they are: the handler may be gone by now, or not be written in Python.
    """
    try:
        _loaded[name] = _load(name)
    except Exception as error:
        if is_interrupt(error):
            raise
        return f"{type(error).__name__}: {error}"
    return None


def generators_for(package: str) -> Generators | None:
    """Who knows the generators of random numbers of a top-level package; None: it has none that are known."""
    if package == "random":
        return of_python
    if package in sys.stdlib_module_names or package in ("__main__", "recompute") or package not in installed():
        return None
    adapter = None if package not in _loaded and _is_being_loaded(package) else load(package)
    return None if adapter is None else adapter.generators()


def _is_being_loaded(name: str) -> bool:
    """Whether this thread is loading the adapter now: its module uses the cache while it is imported."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _load.__code__ and frame.f_locals["name"] == name:
            return True
        frame = frame.f_back
    return False


def _find(cls: type) -> Adapter | None:
    """The adapter of a class; None: the default one, until that which may serve it is loaded."""
    for base in cls.__mro__[:-1]:
        if base in _registered:
            return _registered[base]
        package = base.__module__.partition(".")[0]
        if package in sys.stdlib_module_names or package == "__main__" or package == "recompute":
            continue
        if package in installed():
            if package not in _loaded and _is_being_loaded(package):
                return None
            adapter = load(package)
            if adapter is not None and adapter.serves(cls):
                return adapter
    return _default
