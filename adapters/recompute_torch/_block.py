"""`budget`: inside the block the tensors of a program share a memory budget."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from threading import get_ident
from time import perf_counter
from typing import Any, ClassVar, Final, Literal

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    is_in_torch_dispatch_mode,
)
from torch.utils._python_dispatch import is_in_any_mode_without_ignore_compile_internals as is_in_any_mode

import recompute as rc
from recompute.extend import Counts, Settings
from recompute.text import parse_budget
from recompute_torch._blocks import CURE, ENTERED_ONCE, Block, choosing, current
from recompute_torch._escapes import GUARDS
from recompute_torch._holders import Floor, explain, warn_of
from recompute_torch._limits import Activations, for_cache
from recompute_torch._native import load
from recompute_torch._native.block import NativeBudget
from recompute_torch._native.build import NotBuilt, Unavailable
from recompute_torch._report import Report, Stats, Step
from recompute_torch._threads import Interrupts
from recompute_torch._tracker import Tracker

_NONE: Final[dict[str, Any]] = {}
_FAKE: Final = (FakeTensor, FunctionalTensor)
_FAKING: Final = torch._C._TorchDispatchModeKey.FAKE
_mode_of: Final = torch._C._get_dispatch_mode
_PLAIN: Final = torch._C._disabled_torch_dispatch_impl
_modes: Final = torch._C._len_torch_function_stack


class _Mode(TorchDispatchMode):
    """Sees every operator call of a thread, below autograd."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: the wrapper that keeps Dynamo out of a mode takes a microsecond a call. What is below does the same."""
        return False

    def __init__(self, tracker: Tracker, interrupts: Interrupts) -> None:
        super().__init__()
        self._tracker = tracker
        self._rules = tracker.rules
        self._interrupts = interrupts

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for cls in types:  # classes with operators of their own do theirs first, which then arrive here
            if cls.__torch_dispatch__ is not _PLAIN:  # type: ignore[attr-defined]  # they are classes of tensors
                return func(*args, **(kwargs or _NONE)) if cls in _FAKE else NotImplemented
        if self._tracker.closed or _mode_of(_FAKING) is not None:  # a thread that outlives the block; nothing is real
            return func(*args, **(kwargs or _NONE))
        try:
            known = self._rules.get(id(func)) or self._tracker.learn(func)
            if _modes():  # mostly none: they are only left where code in C++ calls an operator, such as nested_tensor
                with torch._C.DisableTorchFunction():
                    return known[0](func, known[1], args, kwargs or _NONE)
            return known[0](func, known[1], args, kwargs or _NONE)
        except rc.BudgetError as error:
            explain(error, self._tracker.floor_now(), self._tracker.cache.extend.pools())
            raise
        finally:
            if self._interrupts.waiting:
                self._interrupts.deliver()


set_code_exec_strategy(_Mode.__torch_dispatch__.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


_modes_inside: Final[set[_Mode]] = set()
"""Those of all threads."""
_before: Final[list[bool]] = []
"""Torch's flags of modes without them: it has one set for the whole process, not one for each thread."""


if hasattr(os, "register_at_fork"):  # a child has no other threads
    os.register_at_fork(after_in_child=lambda: _modes_inside.intersection_update(_get_current_dispatch_mode_stack()))


def _flags() -> tuple[bool, bool, bool]:
    return is_in_torch_dispatch_mode(), is_in_torch_dispatch_mode(False), is_in_any_mode()


class budget(Block):
    """Train, or do whatever else with tensors, in a memory budget.

    Inside the block every tensor takes part: what operators make may be evicted, and is made again when it is needed.
    They stay ordinary tensors, and after the block all that are alive have their content.

    Parameters
    ----------
    budget
        Bytes ("5GB") for each device; a share (0.8, "80%") of each device's memory; a mapping from device ("cpu",
        "cuda:0") to one of these; "auto": what the device has: something is evicted when an allocation fails; None: no
        limit, which is the same, and only watches otherwise.
    activations
        Instead: bytes for activations, beside whatever has to stay (parameters, gradients, what the optimizer
        remembers, inputs); or a share of what they take without a limit ("40%"), for which the first step is measured.
    smallest
        Storages of fewer bytes ("1MB") are never evicted to make room: many small ones are not worth the search.
    only_checkpointed
        Only what is made from tensors that were given to `checkpoint` takes part.
    policy, search, foresight, trace, verify, clock
        As for `recompute.Cache`. A round ends with a step of the first optimizer.
    tiers
        As for `recompute.Cache`: `{"cuda:0": [rc.Host("64GB")]}`. Parameters, gradients and what an optimizer remembers
        may move, too, so the budget can be smaller than all of them; an optimizer that takes all of them in one
        operator (`foreach=True`, the default on a GPU) needs them in memory together, `foreach=False` does not.
    history
        How many calls are remembered at most for the sake of what was made from them; with more, see `commit`.
    native
        True: track operators below Python, in C++ that is built for the installed torch (docs/torch.md); raises
        RuntimeError where that cannot be. False: in Python. None: below Python where that can be, in one block of the
        process at a time, unless the variable RECOMPUTE_TORCH_NATIVE of the environment is 0; `block.path` says which.

    Threads that those inside start take part, and others can enter it too: it is left when the last one leaves. Cost: a
    microsecond an operator call below Python, tens of them in Python (docs/results/torch_overhead.md).
    """

    path: ClassVar[Literal["python", "native"]] = "python"

    def __new__(cls, *args: Any, native: bool | None = None, **options: Any) -> budget:
        """A block of the path that is asked for. Raises RuntimeError if it is the native one, and that cannot be."""
        if cls is not budget or native is False:
            return object.__new__(cls)
        if native not in (None, True):
            raise TypeError(f"native is True, False or None, not {native!r}")
        instead = None if native else partial(cls, *args, native=False, **options)
        try:
            return budget.register(NativeBudget)(*args, instead=instead, **options)  # type: ignore[return-value]
        except Unavailable as error:
            if native:
                raise
            load.say_once(str(error), logging.WARNING if isinstance(error, NotBuilt) else logging.INFO)
            return object.__new__(cls)

    def __init__(
        self,
        budget: Any = None,
        /,
        *,
        activations: Any = None,
        smallest: Any = 1,
        only_checkpointed: bool = False,
        policy: Any = None,
        search: Any = "exact",
        foresight: bool = True,
        tiers: Any = (),
        trace: str | os.PathLike[str] | None = None,
        verify: bool = False,
        clock: Callable[[], float] = perf_counter,
        history: int = 100_000,
        native: bool | None = None,
    ) -> None:
        if budget is not None and activations is not None:
            raise TypeError("give budget, for all memory, or activations, for these alone; not both")
        named = {} if policy is None else {"policy": policy}
        self.cache: Final = rc.Cache(
            for_cache(budget),
            search=search,
            foresight=foresight,
            tiers=tiers,
            trace=trace,
            verify=verify,
            clock=clock,
            settings=Settings(
                smallest=parse_budget(smallest, of="what", what="smallest"),
                cure=CURE,
                package="torch",
                paste='rt.budget("{budget}")',
            ),
            **named,
        )
        self._activations = None if activations is None else Activations(self.cache, activations)
        self._measures = False
        super().__init__()
        self._tracker = Tracker(
            *(self.cache, history),
            everything=not only_checkpointed,
            watching=self._mode,
            moves=bool(tiers),
            verifies=verify,
        )

    def _open(self) -> None:
        """The first thread enters."""
        if self._tracker.closed:
            raise RuntimeError(ENTERED_ONCE)
        GUARDS.open(self)
        if self.cache.budget is not None and self._tracker.floor is None:
            self._tracker.floor = self._tracker.floor_now()

    def _take_part(self) -> None:
        here = self._here
        if here.mode is None:
            with choosing:
                if not _modes_inside:
                    _before[:] = _flags()
                here.mode = self._mode(self._tracker)
                _modes_inside.add(here.mode)
                here.mode.__enter__()
        self._interrupts.hold()

    def _step_out(self) -> None:
        mode: Any = self._here.mode
        if mode is None:
            return
        with choosing:
            flags = _before if _modes_inside <= {mode} else _flags()
            mode.old_dispatch_mode_flags = [flags[0]]
            mode.old_non_infra_dispatch_mode_flags = [flags[1]]
            mode.old_without_ignore_compile_internals_dispatch_mode_flags = [flags[2]]
            if all(one is not mode for one in _get_current_dispatch_mode_stack()):  # an interrupt came on its way
                torch._C._push_on_torch_dispatch_stack(mode)
            mode.__exit__(None, None, None)
            _modes_inside.discard(mode)
        self._here.mode = None

    def _close(self) -> None:
        try:
            self.cache.next_iteration(last=True)
            self._tracker.leave()
        finally:
            GUARDS.close(self)

    def _after_fork(self) -> None:
        """In a child process."""
        self._interrupts.release()
        self._tracker.fork()

    # Steps of optimizers

    def _steps_now(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """An optimizer is about to make a step."""
        self._tracker.begin_step()
        self._tracker.holders.meet_optimizer(optimizer)

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """An optimizer has made a step; with that of the first one a round of training ends."""
        for tensor in self._tracker.holders.remembered(optimizer):
            self._tracker.meet(tensor)
            self._tracker.keep(tensor)  # what it is made of, such as gradients, need not stay for it
        self._tracker.stepping.discard(get_ident())
        if self._ends_a_round(optimizer):
            self._record_step()
            self.cache.next_iteration()

    def _look_at(self, step: Step) -> None:
        """Learn from a step, and warn of what it shows."""
        if self._activations is not None:
            self._activations.stepped()
        floor = self._tracker.floor
        if floor is not None and step.number == 1:
            warn_of(floor, self.cache.extend.pools())
            if not self._measures:
                self._tracker.floor = None

    def _counts(self) -> Counts:
        return self.cache.extend.counts()

    def _lap_peak(self) -> int:
        return sum(self.cache.extend.lap().values())

    def _measure(self) -> Floor:
        """Have all operators of the block measured, not only those of the first step."""
        self._measures = True
        floor = self._tracker.floor = self._tracker.floor_now()
        return floor

    def _mode(self, tracker: Tracker) -> _Mode:
        return _Mode(tracker, self._interrupts)

    # What a user asks

    @property
    def budget(self) -> Any:
        """Bytes, or bytes by device; None: unlimited. A smaller one evicts what no longer fits."""
        return self.cache.budget

    @budget.setter
    def budget(self, budget: Any) -> None:
        self.cache.budget = for_cache(budget)
        self._activations = None

    def stats(self) -> Stats:
        """What the cache did and holds, and which path ran."""
        stats = self.cache.stats()
        return Stats(**{field.name: getattr(stats, field.name) for field in fields(rc.Stats)})

    def report(self, *, html: str | os.PathLike[str] | None = None) -> Report:
        """What holds memory, what the last steps took, and what more memory would give: `print(block)` shows it.

        In another thread than the one that trains, gradients count as inputs and others.

        `html`: also write a page there that says what each budget would cost, as `recompute.report` does. That takes a
        recording: ValueError for a block without `trace=`.
        """
        if html is not None:
            rc.report(self.cache, seconds=10.0).save(html)
        stats = self.stats()
        tracker = self._tracker
        held = tracker.holders.sizes(tracker.known())
        held["inputs and others"].here += max(0, stats.used - sum(size.here for size in held.values()))
        load = self.cache.extend.load()
        whole = max(tracker.whole, load.missing + load.used)
        return Report(held, tracker.holders.handed_out(), whole, tuple(self._steps), stats)

    def commit(self) -> None:
        """Forget how everything was made: what is alive stays in memory.

        A training does not need it: what was made from a parameter is forgotten when the parameter changes.
        """
        self._tracker.commit()
        self._interrupts.deliver()

    def _met_storages(self) -> list[Any]:
        return self._tracker.known()

    def _own(self, tensor: torch.Tensor) -> None:
        """It takes part."""
        self._tracker.own([tensor])

    def _forget(self, tensor: torch.Tensor) -> None:
        """It stays, and how it was made is forgotten."""
        self._tracker.forget([tensor])

    def __repr__(self) -> str:
        return f"<budget {self.cache!r}>"


def checkpoint(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, which takes part in the budget block that is open in this thread, and what is made from it.

    For `budget(..., only_checkpointed=True)`; otherwise all tensors do anyway. Raises RuntimeError outside of a block.
    """
    _block("checkpoint")._own(tensor)
    return tensor


def decheckpoint(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, with its content, which stays; how it was made is forgotten."""
    _block("decheckpoint")._forget(tensor)
    return tensor


def _block(name: str) -> Any:
    blocks = getattr(current, "blocks", None)
    if not blocks:
        raise RuntimeError(f"{name} works inside of a budget block: with rt.budget(...):")
    return blocks[-1]
