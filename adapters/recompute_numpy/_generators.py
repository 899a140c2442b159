"""Generators of random numbers: those of `numpy.random`, and the one behind its functions."""

from __future__ import annotations

import pickle
from typing import Any, Final

import numpy as np

from recompute.extend import Generators


class NumpyGenerators(Generators):
    """`Generator`, `RandomState` and bit generators. How many children were spawned belongs to the state."""

    def serves(self, cls: type) -> bool:
        return issubclass(cls, (np.random.Generator, np.random.RandomState, np.random.BitGenerator))

    def of_module(self, name: str) -> Any | None:
        """That of `numpy.random.normal`, which other libraries draw from, too."""
        return np.random.mtrand._rand if name in ("numpy.random", "numpy.random.mtrand") else None

    def identity(self, generator: Any) -> Any:
        """The bit generator: two generators may draw from one."""
        return _bits(generator)

    def save(self, generator: Any) -> bytes:
        """126 bytes for PCG64, 2.7 kB for MT19937; 4 and 66 microseconds."""
        legacy = isinstance(generator, np.random.RandomState)
        state = generator.get_state(legacy=False) if legacy else _bits(generator).state
        spawned = getattr(_bits(generator).seed_seq, "n_children_spawned", 0)
        return pickle.dumps((state, spawned), 5)

    def restore(self, generator: Any, state: bytes) -> None:
        """Raises ValueError if children were spawned meanwhile: their number cannot be set."""
        bits_state, spawned = pickle.loads(state)
        if getattr(_bits(generator).seed_seq, "n_children_spawned", 0) != spawned:
            raise ValueError("children were spawned from it; spawn them outside, and pass one as an argument")
        if isinstance(generator, np.random.RandomState):
            generator.set_state(bits_state)
        else:
            _bits(generator).state = bits_state

    def copy(self, generator: Any, state: bytes) -> Any:
        """With a bit generator of its own."""
        bits_state, spawned = pickle.loads(state)
        bits = _bits(generator)
        seeds: Any = bits.seed_seq
        if type(seeds) is np.random.SeedSequence:
            seeds = np.random.SeedSequence(
                seeds.entropy, spawn_key=seeds.spawn_key, pool_size=seeds.pool_size, n_children_spawned=spawned
            )
        made: Any = type(bits)(seeds)
        if generator is not bits:
            made = type(generator)(made)
        if isinstance(generator, np.random.RandomState):
            made.set_state(bits_state)
        else:
            _bits(made).state = bits_state
        return made


def _bits(generator: Any) -> Any:
    if isinstance(generator, np.random.RandomState):
        return generator._bit_generator
    return getattr(generator, "bit_generator", generator)


generators: Final = NumpyGenerators()
