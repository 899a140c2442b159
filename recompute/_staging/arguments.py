"""The arguments of a planned function: inputs, whose values may differ in later calls, and the rest, which may not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from recompute._adapters.adapter import Adapter, kinds
from recompute._adapters.sizes import ATOMIC
from recompute._context import current_cache
from recompute._errors import StagingError
from recompute._interrupts import is_interrupt
from recompute._recomputable import Recomputable

_CONTAINERS: Final = (list, tuple, dict)


class Layout:
    """Which of the arguments are inputs, what they look like, and what the others are."""

    def __init__(self) -> None:
        self._known: list[tuple[str, Any]] = []  # where, and signature or structure, in the order of a walk

    def take(self, argument: Any, where: str, inputs: list[Recomputable[Any]]) -> Any:
        """The example with its inputs as sources, which are added to `inputs`."""
        if isinstance(argument, _CONTAINERS):
            self._known.append((where, _structure(argument)))
            if isinstance(argument, dict):
                parts = {
                    key: self.take(argument[key], _inside(where, key), inputs)
                    for key in sorted(argument, key=_by_type)  # that of later calls may have another order
                }
                return {key: parts[key] for key in argument}
            taken = [self.take(part, _inside(where, at), inputs) for at, part in enumerate(argument)]
            return taken if isinstance(argument, list) else _rebuild(argument, taken)
        payload = argument.get() if isinstance(argument, Recomputable) else argument
        if not isinstance(argument, Recomputable) and not _is_input(payload):
            self._known.append((where, _Equal.now(payload)))
            return argument
        self._known.append((where, _look(payload)))
        like = type(argument) if isinstance(argument, Recomputable) else Recomputable  # array code needs its arrays
        inputs.append(current_cache().extend.source(payload, like))
        return inputs[-1]

    def match(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The payloads of the inputs, in order. Raises StagingError if the arguments are not like the examples."""
        payloads: list[Any] = []
        stack: list[Any] = [kwargs, args]
        for where, known in self._known:
            argument = stack.pop()
            if isinstance(known, _Equal):
                if not known.to(argument):
                    same = argument is known.example
                    what = f"the same {type(argument).__name__}, but it has changed" if same else repr(argument)[:60]
                    raise _unlike(where, what if same else f"{what} instead of {repr(known.example)[:60]}")
            elif isinstance(argument, _CONTAINERS):
                if _structure(argument) != known:
                    raise _unlike(where, _describe(argument))
                if isinstance(argument, dict):
                    stack.extend(argument[key] for key in reversed(known[1]))
                else:
                    stack.extend(reversed(argument))
            else:
                payload = argument.get() if isinstance(argument, Recomputable) else argument
                if _look(payload) != known:
                    raise _unlike(where, _describe(payload))
                payloads.append(payload)
        return payloads


@dataclass(frozen=True)
class _Equal:
    """An argument that is part of the graph."""

    example: Any
    again: Callable[[], Any] | None
    """Gives the example as it was, if it can change."""

    @classmethod
    def now(cls, example: Any) -> _Equal:
        remember = kinds[type(example)].remember
        return cls(example, None if remember is None else remember(example))

    def to(self, other: Any) -> bool:
        cls = type(self.example)
        if type(other) is not cls:
            return False
        if cls in (float, complex):
            return repr(other) == repr(self.example)  # zero has a sign, and what is not a number equals nothing
        try:
            value = self.example if self.again is None else self.again()
            return other is value or bool(other == value)
        except Exception as error:  # whatever a foreign == raises: it did not say yes
            if is_interrupt(error):
                raise
            return False


def _is_input(payload: Any) -> bool:
    cls = type(payload)
    served = kinds[cls].adapter.name != Adapter.name or hasattr(cls, "__array__") or hasattr(cls, "__dlpack__")
    return served and cls not in ATOMIC


def _look(payload: Any) -> Any:
    signature = kinds[type(payload)].signature
    return type(payload), None if signature is None else signature(payload)


def _structure(container: Any) -> Any:
    return type(container), sorted(container, key=_by_type) if isinstance(container, dict) else len(container)


def _by_type(key: Any) -> tuple[str, str]:
    return type(key).__name__, str(key)


def _rebuild(like: Any, parts: list[Any]) -> Any:
    return type(like)._make(parts) if hasattr(like, "_make") else type(like)(parts)


def _inside(where: str, key: Any) -> str:
    return f"argument {key!r}" if where.startswith("the ") else f"{where}[{key!r}]"


def _describe(value: Any) -> str:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", "")
    if shape is not None:
        return f"{type(value).__name__} {dtype}{list(shape)}"
    if isinstance(value, _CONTAINERS):
        return f"{type(value).__name__} of {list(value) if isinstance(value, dict) else len(value)}"
    return type(value).__name__


def _unlike(where: str, what: str) -> StagingError:
    return StagingError(
        f"this is not the graph that was planned: {where} differ{'' if where.startswith('the ') else 's'} from the "
        f"example: {what}; plan the function again, with arguments like these"
    )
