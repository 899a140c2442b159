"""`budget`: inside the block the tensors of a program share a memory budget."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping
from threading import RLock, get_ident, local
from time import perf_counter
from types import TracebackType
from typing import Any, ClassVar, Final, Literal
from weakref import WeakSet, ref

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

import recompute as rc
from recompute.extend import Settings
from recompute.text import bytes_or_share, parse_budget
from recompute_torch import _escapes
from recompute_torch._floor import Floor, explain, warn_of
from recompute_torch._interrupts import Interrupts
from recompute_torch._net import Net
from recompute_torch._report import Report, Step
from recompute_torch._stats import Stats, of_python
from recompute_torch._threads import Threads
from recompute_torch._tracker import Tracker

_NONE: Final[dict[str, Any]] = {}
_FAKE: Final = (FakeTensor, FunctionalTensor)
_FAKING: Final = torch._C._TorchDispatchModeKey.FAKE
_mode_of: Final = torch._C._get_dispatch_mode
_PLAIN: Final = torch._C._disabled_torch_dispatch_impl


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
            return known[0](func, known[1], args, kwargs or _NONE)
        except rc.BudgetError as error:
            explain(error, self._tracker)
            raise
        finally:
            if self._interrupts.waiting:
                self._interrupts.deliver()


set_code_exec_strategy(_Mode.__torch_dispatch__.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))

_current: Final = local()

_CURE: Final = (
    "Raise the budget, or take smaller batches; print(block) shows what holds memory and what is repeated, and "
    "rt.least(step) what each budget costs."
)

_ENTERED_ONCE: Final = "a budget block is entered once; make a new one: with rt.budget(...):"

_REMEMBERED: Final = 1000
"""Steps."""

_blocks: Final[WeakSet[budget]] = WeakSet()
"""Those that are open, for processes that are forked off: the workers of a DataLoader."""


def _forked() -> None:
    for block in list(_blocks):
        block._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


class budget:
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
        operator (`foreach=True`, the default on a GPU) needs them in memory at once, `foreach=False` does not.
    history
        How many calls are remembered at most for the sake of what was made from them; with more, see `commit`.
    native
        True: track operators below Python, in C++ that is built for the installed torch (docs/torch.md); raises
        RuntimeError where that cannot be. False: in Python. None: in Python, unless the variable RECOMPUTE_TORCH_NATIVE
        of the environment is 1, and the native path is there or can be built.

    Threads that are started inside the block take part, and others can enter it too: it is left when the last one
    leaves. Cost: some ten microseconds an operator call (docs/results/torch.md).
    """

    path: ClassVar[Literal["python", "native"]] = "python"
    """Which one tracks the operators: a dispatch mode, or C++ below it."""

    def __new__(cls, *args: Any, native: bool | None = None, **options: Any) -> budget:
        """A block of the path that is asked for."""
        return object.__new__(_path(native, args[0] if args else None, options) if cls is budget else cls)

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
            _bytes(budget),
            search=search,
            foresight=foresight,
            tiers=tiers,
            trace=trace,
            verify=verify,
            clock=clock,
            settings=Settings(
                smallest=parse_budget(smallest, of="what", what="smallest"),
                cure=_CURE,
                package="torch",
                paste='rt.budget("{budget}")',
                keeps=False,
            ),
            **named,
        )
        self._net = None if activations is None else Net(self.cache, activations, _devices())
        self._listeners: list[Callable[[Step], Any]] = []
        self._steps: deque[Step] = deque(maxlen=_REMEMBERED)
        self._lap = 0, perf_counter(), self.cache.extend.counts()
        self._measures = False
        self._interrupts = Interrupts()
        self._tracker = Tracker(
            self.cache, history, everything=not only_checkpointed, watching=self._mode, moves=bool(tiers)
        )
        self._here = local()
        self._threads: Threads | None = None
        self._entered = 0
        self._hooks: list[Any] = []
        self._optimizer: ref[torch.optim.Optimizer] | None = None
        self._lock = RLock()

    def __enter__(self) -> budget:
        around = self._around()
        with self._lock:
            if not self._entered:
                if self._tracker.closed:
                    raise RuntimeError(_ENTERED_ONCE)
                if any(block.path == "native" for block in _blocks):
                    raise RuntimeError("a native budget block is open in this process, which is alone: leave it first")
                _escapes.guard()
                _blocks.add(self)
                if self.cache.budget is not None and self._tracker.floor is None:
                    self._tracker.floor = Floor(self._tracker.holders, self._tracker.known)
                self._threads = Threads(self._join)
                self._hooks = [
                    register_optimizer_step_pre_hook(self._steps_now),
                    register_optimizer_step_post_hook(self._stepped),
                ]
            self._entered += 1
            self._begin()
        _current.blocks = [*around, self]
        return self

    def _around(self) -> list[budget]:
        """The entries of this thread that have not ended, all of this block. Raises RuntimeError for another one's."""
        around: list[budget] = getattr(_current, "blocks", [])
        if any(block is not self for block in around):
            raise RuntimeError(
                "a budget block is open in this thread already, and tensors can belong to one only; "
                "to change its budget, set block.budget"
            )
        return around

    def _join(self) -> None:
        with self._lock:
            self._begin()

    def _begin(self) -> None:
        """This thread takes part, as long as it has not ended as often as it has begun."""
        here = self._here
        here.times = getattr(here, "times", 0) + 1
        if here.times == 1:
            here.mode = self._mode(self._tracker)
            here.mode.__enter__()
            self._interrupts.hold()

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
        first = None if self._optimizer is None else self._optimizer()
        if first is None:
            self._optimizer = ref(optimizer)
        if first is None or first is optimizer:
            self._over()
            self.cache.next_iteration()

    def _over(self) -> None:
        """A step is over."""
        step = self._lapped()
        self._steps.append(step)
        if self._net is not None:
            self._net.stepped()
        floor = self._tracker.floor
        if floor is not None and step.number == 1:
            warn_of(floor, self.cache.extend.pools())
            if not self._measures:
                self._tracker.floor = None
        for listener in list(self._listeners):
            listener(step)

    def _lapped(self) -> Step:
        done, now = self.cache.extend.counts(), perf_counter()
        before, self._lap = self._lap, (self._lap[0] + 1, now, done)
        number, began, earlier = before
        return Step(
            number=number + 1,
            peak=sum(self.cache.extend.lap().values()),
            evictions=done.evictions - earlier.evictions,
            operations=done.operations - earlier.operations,
            repeated=done.rematerializations - earlier.rematerializations,
            compute=done.seconds - earlier.seconds,
            repeated_compute=done.repeated_seconds - earlier.repeated_seconds,
            seconds=now - began,
        )

    def _measure(self) -> Floor:
        """Have all operators of the block measured, not only those of the first step."""
        self._measures = True
        floor = self._tracker.floor = Floor(self._tracker.holders, self._tracker.known)
        return floor

    def _mode(self, tracker: Tracker) -> _Mode:
        return _Mode(tracker, self._interrupts)

    def _end(self) -> None:
        here = self._here
        here.times -= 1
        if not here.times:
            here.mode.__exit__(None, None, None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _current.blocks = _current.blocks[:-1]
        with self._lock:
            self._end()
            self._entered -= 1
            try:
                if not self._entered:
                    self._leave()
            finally:
                if not self._here.times:
                    self._interrupts.let_go()
                self._interrupts.deliver()

    def _leave(self) -> None:
        try:
            self.cache.next_iteration(last=True)
            self._tracker.leave()
        finally:
            if self._threads is not None:
                self._threads.close()
            for hook in self._hooks:
                hook.remove()
            _escapes.unguard()
            _blocks.discard(self)

    @property
    def budget(self) -> Any:
        """Bytes, or a mapping from device to these; None: unlimited. Setting it evicts at once."""
        return self.cache.budget

    @budget.setter
    def budget(self, budget: Any) -> None:
        self.cache.budget = _bytes(budget)
        self._net = None

    def stats(self) -> Stats:
        """What the cache did and holds, and which path ran."""
        return of_python(self.cache.stats())

    def report(self, *, html: str | os.PathLike[str] | None = None) -> Report:
        """What holds memory, what the last steps took, and what more memory would give: `print(block)` shows it.

        `html`: also write a page there that says what each budget would cost, as `recompute.report` does. That takes a
        recording: ValueError for a block without `trace=`.
        """
        if html is not None:
            rc.report(self.cache, seconds=10.0).save(html)
        stats = self.stats()
        tracker = self._tracker
        held = tracker.holders.sizes(tracker.known())
        held["inputs and others"].here += max(0, stats.used - sum(each.here for each in held.values()))
        load = self.cache.extend.load()
        whole = max(tracker.whole, load.missing + load.used)
        return Report(held, tracker.holders.handed_out(), whole, tuple(self._steps), stats)

    def on_step(self, listener: Callable[[Step], Any]) -> None:
        """Call `listener(step)` after each step of the first optimizer, with what it took: see `Step`."""
        self._listeners.append(listener)

    def commit(self) -> None:
        """Forget how everything was made: what is alive stays in memory from now on.

        Nobody needs to call this in a training: what was made from a parameter is forgotten when the parameter changes.
        """
        self._tracker.commit()
        self._interrupts.deliver()

    def _after_fork(self) -> None:
        """In a child process."""
        self._interrupts.let_go()
        self._tracker.fork()

    def _own(self, tensor: torch.Tensor) -> None:
        """It takes part."""
        self._tracker.own([tensor])

    def _forget(self, tensor: torch.Tensor) -> None:
        """It stays, and how it was made is forgotten."""
        self._tracker.forget([tensor])

    def __repr__(self) -> str:
        return f"<budget {self.cache!r}>"

    def __str__(self) -> str:
        return str(self.report())

    def _repr_html_(self) -> str:
        return self.report()._repr_html_()


def checkpoint(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, which takes part in the budget block that is open in this thread, and what is made from it.

    For `budget(..., only_checkpointed=True)`; otherwise all tensors do anyway. Raises RuntimeError outside of a block.
    """
    _block("checkpoint")._own(tensor)
    return tensor


def decheckpoint(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, with its content, which stays from now on; how it was made is forgotten."""
    _block("decheckpoint")._forget(tensor)
    return tensor


def _path(native: bool | None, size: Any, options: Mapping[str, Any]) -> type[budget]:
    """The class of a block. Raises RuntimeError if the native path is asked for and cannot be."""
    if native is False or (native is None and os.environ.get("RECOMPUTE_TORCH_NATIVE", "") in ("", "0")):
        return budget  # mostly, without a look at what is not needed
    from recompute_torch._native import block, load
    from recompute_torch._native.build import Unavailable

    if native is None:
        try:
            wrong = "" if load.preferred() else "the environment forbids the native path"
            wrong = wrong or block.serves(options, options.get("policy"))
            if not wrong:
                block.limit_of(size)
                load.library()
        except Unavailable as error:
            wrong = str(error)
        if wrong:
            load.say_once(wrong)
            return budget
    return block.NativeBudget


def _block(name: str) -> budget:
    blocks = getattr(_current, "blocks", None)
    if not blocks:
        raise RuntimeError(f"{name} works inside of a budget block: with rt.budget(...):")
    return blocks[-1]  # type: ignore[no-any-return]  # a thread-local attribute has any type


def _bytes(budget: Any) -> Any:
    """A budget as the cache takes it: shares of a device's memory become bytes."""
    if isinstance(budget, Mapping):
        return {device: _size(device, each) for device, each in budget.items()}
    if budget == "auto":
        return None
    if budget is None or callable(budget) or isinstance(bytes_or_share(budget), int):
        return budget
    return {device: _size(device, budget) for device in _devices()}


def _devices() -> list[str]:
    return ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]


def _size(device: str, budget: Any) -> Any:
    if device == "cpu" or budget is None or callable(budget):  # the cache knows the memory of the machine itself
        return budget
    return parse_budget(budget, whole=lambda: int(torch.cuda.mem_get_info(torch.device(device))[1]))
