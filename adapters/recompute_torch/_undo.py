"""What some steps of a training change, and how it was before: so that they can be tried without a trace.

Tensors are copied before the first operator writes to them. Parameters, optimizers, schedulers, scalers and generators
of random numbers are found and noted down beforehand.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from recompute_torch._memory import copy, quietly
from recompute_torch._recipe import storages, tensors
from recompute_torch._rules import Rule, rule_of


class Undo(TorchDispatchMode):
    """Inside the block the content of tensors is kept before it is written; `back` is called after it."""

    def __init__(self) -> None:
        super().__init__()
        self._rules: dict[Any, Rule] = {}
        self._made: dict[int, ref[Any]] = {}  # storages made inside, by identity
        self._before: dict[int, tuple[Any, Any]] = {}  # storages from outside that were written, and what was there
        self._steps = [*_generators(), *_objects()]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = self._rules.get(func)
        if rule is None:
            rule = self._rules[func] = rule_of(func)
        kwargs = kwargs or {}
        given = [*args, *kwargs.values()]
        if rule.what in ("writes", "other", "reshapes") or rule.hidden:
            written = [kwargs.get(each) if isinstance(each, str) else args[each] for each in rule.written]
            written += [args[each] for each in rule.hidden]
            for storage in storages(written if rule.what != "reshapes" else given):
                self._keep(storage)
        result = func(*args, **kwargs)
        taken = {id(each) for each in storages(list(tensors(given)))}
        for storage in storages(result):
            if id(storage) not in taken and id(storage) not in self._before:
                self._made[id(storage)] = ref(storage, partial(_forget, self._made, id(storage)))
        return result

    def _keep(self, storage: Any) -> None:
        if id(storage) not in self._made and id(storage) not in self._before:
            self._before[id(storage)] = storage, copy(storage)

    def back(self) -> None:
        """All is as it was before the block."""
        for storage, content in self._before.values():
            if storage.nbytes() != content.nbytes():
                storage.resize_(content.nbytes())
            quietly(partial(storage.copy_, content))
        self._before.clear()
        for step in self._steps:
            step()


def _forget(made: dict[int, Any], number: int, _: Any) -> None:
    made.pop(number, None)


def _generators() -> list[Callable[[], Any]]:
    """How to put generators of random numbers back."""
    generators = [torch.default_generator]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        generators += list(torch.cuda.default_generators)
    found: list[Callable[[], Any]] = [partial(each.set_state, each.get_state()) for each in generators]
    found.append(partial(random.setstate, random.getstate()))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found.append(partial(numpy.random.set_state, numpy.random.get_state()))
    return found


def _objects() -> list[Callable[[], Any]]:
    """How to put gradients, and what else is no tensor that an operator writes, back to what they are now."""
    found: list[Callable[[], Any]] = []
    kinds = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
    for each in gc.get_objects():
        cls = type(each)
        if issubclass(cls, torch.nn.Parameter):
            found.append(partial(setattr, each, "grad", each.grad))
        elif issubclass(cls, kinds):
            found.append(_noted(vars(each)))
    return found


def _noted(value: Any) -> Callable[[], Any]:
    """How to get a value as it is now: dicts and lists are the same objects, with what is in them now."""
    if isinstance(value, dict):
        items = {key: _noted(each) for key, each in value.items()}
        return partial(_refill, value, lambda: {key: each() for key, each in items.items()})
    if isinstance(value, list):
        parts = [_noted(each) for each in value]
        return partial(_refill, value, lambda: [each() for each in parts])
    return lambda: value


def _refill(container: Any, content: Callable[[], Any]) -> Any:
    found = content()
    container.clear()
    (container.update if isinstance(container, dict) else container.extend)(found)
    return container
