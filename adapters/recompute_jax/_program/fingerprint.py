"""A program's fingerprint: two traced functions have the same one if they are equation by equation the same."""

from __future__ import annotations

import re
from collections.abc import Callable
from hashlib import sha256
from typing import Any, Final

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

from recompute_jax._program.jaxpr import Flat, short

_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+|0x[0-9a-f]{6,}")


def fingerprint(flat: Flat) -> str:
    """Of the equations, their parameters and types; constants count by type, functions by name. O(equations)."""
    digest = sha256()

    def say(text: str) -> None:
        digest.update(text.encode())
        digest.update(b"\n")

    _walk(flat.constvars, flat.invars, flat.equations, flat.outvars, say)
    return digest.hexdigest()


def _walk(constvars: Any, invars: Any, equations: Any, outvars: Any, say: Callable[[str], None]) -> None:
    names: dict[Var, int] = {}

    def bound(var: Any) -> str:
        names[var] = len(names)
        return short(var.aval)

    def read(atom: Any) -> str:
        return f"{atom.val!r}:{short(atom.aval)}" if isinstance(atom, Literal) else str(names[atom])

    say(f"given {[*map(bound, [*constvars, *invars])]}")
    for eqn in equations:
        say(f"{eqn.primitive.name} {[*map(read, eqn.invars)]} {[*map(bound, eqn.outvars)]}")
        for name in sorted(eqn.params):
            value = eqn.params[name]
            for each in value if isinstance(value, (tuple, list)) else (value,):
                inner = each.jaxpr if isinstance(each, ClosedJaxpr) else each
                if isinstance(inner, Jaxpr):
                    say(f"{name} is a program")
                    _walk(inner.constvars, inner.invars, inner.eqns, inner.outvars, say)
                else:
                    say(f"{name} {_ADDRESS.sub('', repr(_ordered(each)))}")
    say(f"made {[*map(read, outvars)]}")


def _ordered(value: Any) -> Any:
    return sorted(map(repr, value)) if isinstance(value, (set, frozenset)) else value
