"""`rt.budget(native=True)`: a block whose operators are tracked below Python.

It has the methods of `budget`. What Python does here is little: it opens the tracker with the core's policy as numbers
(who is evicted is asked in the middle of kernels, where no Python can run), lets threads take part, and tells of the
steps of optimizers.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from array import array
from collections.abc import Callable, Mapping
from dataclasses import fields
from math import inf
from time import perf_counter
from typing import Any, ClassVar, Final, Literal, Self
from weakref import WeakValueDictionary

import torch

import recompute as rc
from recompute import policies, text
from recompute.extend import Counts, PoolStats, Recomputed, RLock, leave_in_steps
from recompute.text import format_bytes, parse_budget, seconds
from recompute_torch._blocks import CURE, ENTERED_ONCE, OTHERS, Block, open_blocks
from recompute_torch._holders import KINDS, Held, Holders, Parts, needs, warn
from recompute_torch._memory import storage_of
from recompute_torch._native import load
from recompute_torch._native.build import Unavailable
from recompute_torch._recipe import ordinary
from recompute_torch._report import Report, Stats, Step

_DEFAULTS: Final[dict[str, Any]] = {
    "activations": None,
    "only_checkpointed": False,
    "search": "exact",
    "tiers": (),
    "trace": None,
    "verify": False,
    "clock": perf_counter,
}
"""What the native path serves: these values, and no others."""

STEPS: Final = 64
"""Of the pressure, as in the core."""

_STEEP, _RECENT, _LARGE, _STEEP_ALONE, _DRAWN, _NOTHING = range(6)  # as in room.h, with the line that these stand for
_FORMS: Final = {
    policies.Needed: _STEEP,
    policies.Dtr: _STEEP,
    policies.DtrLocal: _STEEP,
    policies.Lru: _RECENT,
    policies.Size: _LARGE,
    policies.Msps: _STEEP_ALONE,
    policies.Random: _DRAWN,
    policies.Nothing: _NOTHING,
}
_AROUND: Final = {"none": 0, "ancestors": 1, "exact": 2, "needed": 3}

_NAMED: Final = 3
"""Operators in a warning."""

_TIMES, _LOST = 4.0, 1.0
"""Repeated runs for each operator, or repeated computing for each second of it, which are worth a warning, as in the
core; from this many seconds on."""


_entering: Final[Any] = RLock()
"""One thread at a time enters a native block, or leaves it."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_entering._at_fork_reinit)  # another thread may have had it


class NativeBudget(Block):
    """A block below Python: see `recompute_torch.budget`. One at a time in a process, on CPU.

    Blocks of the Python path may be open in other threads: neither takes what belongs to the other.
    """

    path: ClassVar[Literal["python", "native"]] = "native"
    _state: Literal["new", "open", "over"] = "new"

    def __init__(
        self,
        budget: Any = None,
        /,
        *,
        smallest: Any = 1,
        policy: Any = None,
        foresight: bool = True,
        history: int = 100_000,
        instead: Callable[[], Block] | None = None,
        **others: Any,
    ) -> None:
        unknown = sorted(others.keys() - _DEFAULTS.keys())
        if unknown:
            raise TypeError(f"budget has no argument {unknown[0]!r}")
        for name, given in others.items():
            if given != _DEFAULTS[name] and not (name == "tiers" and not given):
                raise Unavailable(f"the native path does not serve {name}={given!r}; native=False does")
        self._policy = policies.policy_of("default" if policy is None else policy)
        if type(self._policy) not in _FORMS or self._policy.neighbourhood not in _AROUND:  # code of the user's, say
            served = ", ".join(name for name, cls in policies.POLICIES.items() if cls in _FORMS)
            wrong = f"the native path does not serve policy {self._policy.name!r}, but {served}"
            raise Unavailable(f"{wrong}; native=False does")
        self.budget = budget
        self._library = load.library()
        self._smallest = parse_budget(smallest, of="what", what="smallest")
        self._history = history
        self.holders: Final = Holders()
        self._instead = instead  # makes what this block is if another native one is open as it is entered
        self._remembered = 0  # bytes that optimizers remembered before their first step in the block
        self._tightest: tuple[int, int, int, str] | None = None  # of the last step
        self._hooked: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._final: load.Figures | None = None
        self._repeated: tuple[Recomputed, ...] = ()
        self._warned = False
        self._searched = False
        super().__init__()

    def __enter__(self) -> Self:
        times = len(self._here.entries)
        try:
            with _entering:
                if self._state == "new" and self._instead is not None and load.is_open():
                    load.say_once("another block of this process is below Python")
                    other, listeners = self._instead(), self._listeners
                    self.__class__ = type(other)  # type: ignore[assignment]  # both are blocks
                    self.__dict__ = other.__dict__
                    self._listeners = listeners
                    return self.__enter__()  # that of the other class
                return super().__enter__()
        except BaseException:
            if len(self._here.entries) > times:  # an interrupt has come since
                leave_in_steps(self)
            raise

    def _leave(self, entry: object, rest: tuple[object, ...]) -> None:
        with _entering:
            super()._leave(entry, rest)

    def _open(self) -> None:
        if self._state != "new":
            raise RuntimeError(ENTERED_ONCE)
        policy = self._policy
        steps = [policy.under(step / STEPS).power or 1.0 for step in range(STEPS + 1)]
        powers = (ctypes.c_double * len(steps))(*steps)
        numbers = _FORMS[type(policy)], _AROUND[policy.neighbourhood], powers, getattr(policy, "seed", 0)
        faults = os.environ.get("RECOMPUTE_TORCH_GUARD", "fault") != "error"
        before = load.is_open()
        if load.open_block is not None and not before:  # an interrupt has left it open as it was entered
            load.open_block._wind_up()
        if not before:
            load.opened(self)  # first: an interrupt must not leave open what nobody knows
        if before or self._library.rm_open(
            *(self._limit or 0, self._smallest, self._history, *numbers),
            *(int(faults), id(_NoRoom), id(_look), id(_keep_apart)),
        ):
            raise RuntimeError(
                "another native budget block is open in this process, and there can be only one; "
                "let all threads enter it, or take native=False for one of them"
            )
        self._state = "open"
        for block in open_blocks():
            for storage in block._met_storages():
                load.belongs_to_another(storage)

    def _take_part(self) -> None:
        self._library.rm_take_part(1)

    def _step_out(self) -> None:
        self._library.rm_take_part(0)

    def _close(self) -> None:
        if load.open_block is not self:
            return
        failed, text = load.ended(self._library.rm_close())
        self._final = load.figures(self._library)
        self._repeated = load.repeated(self._library)
        self._state = "over"
        load.closed(self)
        if failed:
            raise RuntimeError(f"tensors could not be brought back at the end of the block: {text}")

    # Steps of optimizers

    def _steps_now(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.holders.meet_optimizer(optimizer)
        if not self._steps:
            self._remembered = self._held()["optimizer"].here
            made = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
            addresses = [_address(gradient) for gradient in made if gradient is not None and ordinary(gradient)]
            seen = (self._tightest, load.tightest(self._library, addresses))
            self._tightest = max(filter(None, seen), key=lambda one: one[0] + one[2])
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for parameter in parameters:
            if parameter is not self._hooked.get(id(parameter)):
                self._hook(parameter)
        gradients = array("q", [made._cdata for parameter in parameters if (made := parameter.grad) is not None])
        self._do(self._library.rm_keep_all, gradients.buffer_info()[0], len(gradients))
        self._library.rm_stepping(1)

    def _hook(self, parameter: Any) -> None:
        """A gradient that has arrived is needed at the step, with all others: it stays until then."""
        if parameter.requires_grad and parameter.is_leaf:
            self._hooked[id(parameter)] = parameter
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._arrived))

    def _arrived(self, parameter: Any) -> None:
        gradient = parameter.grad
        if gradient is not None and (failed := self._library.rm_keep(gradient._cdata)):  # this comes often
            self._raise(failed)

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._library.rm_stepping(0)
        if self._ends_a_round(optimizer):
            self._record_step()

    def _look_at(self, step: Step) -> None:
        """After the first step: warn if the next one, in which there is what the optimizer remembers, cannot work."""
        if step.number > 1 or self._limit is None:
            return
        needed = self.needed()
        if needed.total > self._limit:
            warn(needed, "cpu", self._limit)

    def needed(self, apart: int = 0) -> Parts:
        """What a step needs in memory at once, as the last one has shown, or what ran so far if none has ended.

        `apart`: bytes that were there, and will not be.
        """
        most, own, beside, name = self._tightest or load.tightest(self._library)
        held = self._held()
        parameters, gradients, optimizer = [held[kind].here for kind in KINDS[:3]]
        first = len(self._steps) < 2  # the next step has what the optimizer remembers of this one
        rest = max(0, most - apart - own - parameters - (self._remembered if first else optimizer))
        stayed = min(max(0, gradients - beside), rest)  # not all of them need have been there
        return Parts(parameters, stayed + beside, optimizer, rest - stayed, own, name)

    def _look_at_repeats(self) -> None:
        """Now and then, while operators are repeated: warn if most of the computing is."""
        counts = self._figures()
        repeated = counts.repeated
        often = counts.repeats > _TIMES * counts.operators or repeated > _TIMES * (counts.compute - repeated)
        if self._warned or self._limit is None or not often or repeated < _LOST:
            return
        self._warned = True
        most = ", ".join(
            f"{one.function} ({one.times:,} times, {one.seconds / repeated:.0%})"
            for one in load.repeated(self._library)[:_NAMED]
        )
        text.warn(
            f"{counts.operators:,} operators were repeated {counts.repeats:,} times, which took {seconds(repeated)}, "
            f"because the budget of {format_bytes(self._limit)} is short. Repeated most: {most}. {CURE} "
            "This is said once for each block.",
            rc.ThrashWarning,
            stacklevel=text.outside("torch"),
        )

    def _explained(self, error: str) -> rc.BudgetError:
        """That of an operator that found no room, in the words of a training."""
        needed = int(self._library.rm_needed())
        frame = sys._getframe(text.outside("torch") - 1)
        name, _, rest = error.partition(" ")
        held, sources = self._held(), load.figures(self._library).sources
        parameters, gradients, optimizer = [held[kind].here for kind in KINDS[:3]]
        others = max(0, sources - parameters - gradients - optimizer)
        parts = Parts(parameters, gradients, optimizer, others, max(0, needed - sources), name)
        place = f"{name} (created at {frame.f_code.co_filename}:{frame.f_lineno}) {rest}"
        explained = rc.BudgetError(f"{place}. {needs(parts, 'cpu')}")
        explained.device, explained.operation, explained.needed = "cpu", name, needed
        return explained

    def _counts(self) -> Counts:
        now = self._figures()
        return Counts(now.operators, now.evictions, now.repeats, now.compute, now.repeated)

    def _lap_peak(self) -> int:
        peak = self._figures().lap
        if self._steps or self._tightest is None:
            self._tightest = load.tightest(self._library)
        self._library.rm_next_lap()
        return peak

    # What a user asks

    @property
    def cache(self) -> Ledger:
        """What there is of a cache."""
        return Ledger(self)

    @property
    def budget(self) -> Any:
        """Bytes, or a mapping from device to these; None: unlimited. Setting it evicts what no longer fits."""
        return {"cpu": self._limit} if self._by_device else self._limit

    @budget.setter
    def budget(self, budget: Any) -> None:
        self._limit = limit_of(budget)
        self._by_device = isinstance(budget, Mapping)
        if self._state == "open":
            self._do(self._library.rm_set_budget, 0 if self._limit is None else self._limit)

    def stats(self) -> Stats:
        """What the tracker did and holds."""
        counts = self._figures()
        over = self._state != "open"
        pool = PoolStats(
            device="cpu",
            budget=self._limit,
            used=0 if over else counts.used,
            peak=counts.peak,
            overshoot=counts.overshoot,
            pinned=0,
            sources=0 if over else counts.sources,
            held=0,
            candidates=counts.candidates,
        )
        return Stats(
            used=pool.used,
            peak=counts.peak,
            overshoot=counts.overshoot,
            held=0,
            operations=counts.operators,
            evictions=counts.evictions,
            releases=0,
            rematerializations=counts.repeats,
            recoveries=0,
            model_time=counts.compute - counts.repeated,
            remat_time=counts.repeated,
            scored=counts.scored,
            recomputed=load.repeated(self._library) if self._state == "open" else self._repeated,
            pools=(pool,),
            path=self.path,
        )

    def report(self, *, html: str | os.PathLike[str] | None = None) -> Report:
        """What holds memory, and what the last steps took: `print(block)` shows it. `html` is the Python path's."""
        if html is not None:
            raise ValueError("a page is made of a recording, which takes native=False and trace=...")
        counts = self._figures()
        held = self._held()
        known = sum(size.here for size in held.values())
        held["activations"] = Held(counts.evictable, counts.missing)
        held["inputs and others"].here = max(0, counts.used - known - counts.evictable)
        whole = counts.peak if not counts.evictions else 0
        return Report(held, 0, whole, tuple(self._steps), self.stats())

    def _held(self) -> dict[str, Held]:
        """Bytes of parameters, gradients and what optimizers remember."""
        if not self._searched and not self.holders.parameters():  # before the first step of an optimizer
            self._searched = True
            for thing in gc.get_objects():
                if issubclass(type(thing), torch.nn.Parameter):
                    self.holders.meet(thing)
        held = {kind: Held() for kind in KINDS}
        for kind, tensors in self.holders.groups().items():
            for tensor in tensors:
                if ordinary(tensor) and self._library.rm_state(_address(tensor)):
                    held[kind].here += storage_of(tensor).nbytes()
        return held

    def commit(self) -> None:
        """Forget how everything was made: what is alive stays in memory."""
        self._do(self._library.rm_commit)

    def check(self) -> None:
        """For tests: raise AssertionError if the tracker's records do not agree with each other."""
        wrong = self._library.rm_problems()
        assert not wrong, f"inconsistent records: {wrong}"

    def __repr__(self) -> str:
        size = "without a limit" if self._limit is None else f"of {format_bytes(self._limit)}"
        return f"<budget {size}, below Python>"

    def _figures(self) -> load.Figures:
        if self._state == "new":
            return load.Figures(*[0] * len(fields(load.Figures)))
        return self._final or load.figures(self._library)

    def _own(self, tensor: torch.Tensor) -> None:
        """All tensors take part anyway."""

    def _forget(self, tensor: torch.Tensor) -> None:
        self._do(self._library.rm_keep, tensor._cdata)

    def _do(self, function: Any, *arguments: Any) -> None:
        if failed := function(*arguments):
            self._raise(failed)

    def _raise(self, failed: int) -> None:
        _, text = load.ended(failed)
        raise self._explained(text) if failed == 2 else RuntimeError(text)


class _NoRoom(rc.BudgetError):
    """What torch makes of the tracker's error, with its text: a BudgetError with what a training wants to know."""

    def __new__(cls, error: Any) -> rc.BudgetError:  # type: ignore[misc]  # an instance of the base class, on purpose
        if isinstance(error, rc.BudgetError):  # it comes while another error is handled, and is asked for twice
            return error
        block = load.open_block
        return rc.BudgetError(error) if block is None else block._explained(error)


def _look() -> None:
    """What the tracker calls while operators are repeated."""
    if load.open_block is not None:
        load.open_block._look_at_repeats()


def _keep_apart() -> None:
    """What the tracker calls when a storage comes to it that a block of the Python path has met."""
    address = load.asked()
    if any(storage._cdata == address for block in open_blocks() for storage in block._met_storages()):
        raise RuntimeError(OTHERS)


class Ledger:
    """What a native block has of a cache."""

    def __init__(self, block: NativeBudget) -> None:
        self._block = block

    def release_memory(self, nbytes: int | str | None = None, device: str | None = None) -> int:
        """Evict at least so many bytes, if there are so many; None: all that can be. How many went."""
        wanted = 1 << 62 if nbytes is None else parse_budget(nbytes, of="what", what="nbytes")
        if self._block._state != "open" or device not in (None, "cpu"):
            return 0
        return int(self._block._library.rm_release(wanted))

    def stats(self) -> Stats:
        """Those of the block."""
        return self._block.stats()

    @property
    def budget(self) -> Any:
        """That of the block."""
        return self._block.budget

    @budget.setter
    def budget(self, budget: Any) -> None:
        self._block.budget = budget

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a block below Python has no cache.{name}; rt.budget(..., native=False) has")


def _address(tensor: Any) -> int:
    return storage_of(tensor)._cdata  # type: ignore[no-any-return]  # torch's own


def limit_of(budget: Any) -> int | None:
    """Bytes of a budget on CPU; None: no limit."""
    if isinstance(budget, Mapping):
        others = {device: size for device, size in budget.items() if device != "cpu" and size is not None}
        if others:
            raise Unavailable(
                f"the native path is for the CPU, not {', '.join(others)}; native=False is for all devices"
            )
        budget = budget.get("cpu")
    if budget is None or budget == "auto" or budget == inf:
        return None
    if callable(budget):
        raise Unavailable("the native path takes a budget in bytes, not a function; native=False does")
    return parse_budget(budget, whole=lambda: os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
