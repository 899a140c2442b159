"""Generators of random numbers: how the state of one is saved, and set again.

An adapter says so for those of its framework (`Adapter.generators`); `random` of Python's library is served here.
"""

from __future__ import annotations

import pickle
import random
from array import array
from typing import Any, Final


class Generators:
    """How the states of a library's generators are saved and set again. All may raise: then it is said, and no more.

    Subclass it, and return an instance from `Adapter.generators`.
    """

    def serves(self, cls: type) -> bool:
        """Whether instances of this class are generators."""
        return False

    def of_module(self, name: str) -> Any | None:
        """The generator that the functions of a module of this name draw from; None: there is none."""
        return None

    def identity(self, generator: Any) -> Any:
        """What holds the state, of which there may be two generators."""
        return generator

    def save(self, generator: Any) -> bytes:
        """The state, compact: equal bytes for equal states. Raises where there is no state that could be set again."""
        raise NotImplementedError

    def restore(self, generator: Any, state: bytes) -> None:
        """Set a state that `save` gave."""
        raise NotImplementedError

    def copy(self, generator: Any, state: bytes) -> Any:
        """Another generator like this one, in that state."""
        raise NotImplementedError


class PythonGenerators(Generators):
    """`random.Random` and its subclasses, and the one behind the functions of the module `random`."""

    def serves(self, cls: type) -> bool:
        return issubclass(cls, random.Random)

    def of_module(self, name: str) -> Any | None:
        return getattr(random, "_inst", None) if name == "random" else None

    def save(self, generator: Any) -> bytes:
        version, words, gauss = generator.getstate()
        return pickle.dumps((version, array("I", words).tobytes(), gauss), 5)

    def restore(self, generator: Any, state: bytes) -> None:
        version, words, gauss = pickle.loads(state)
        generator.setstate((version, tuple(array("I", words)), gauss))

    def copy(self, generator: Any, state: bytes) -> Any:
        made = type(generator)()
        self.restore(made, state)
        return made


of_python: Final = PythonGenerators()
