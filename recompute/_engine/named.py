"""What a piece of code names: globals, attributes of these, and modules that it imports; found once for the code."""

from __future__ import annotations

from dis import get_instructions
from types import CodeType
from typing import Final, NamedTuple

Chain = tuple[str, ...]
"""A global name, and attributes one after another: `("np", "random", "rand")`."""


class Named(NamedTuple):
    """Of one piece of code, with the functions that it defines."""

    chains: tuple[Chain, ...]
    """From names among the globals."""
    imported: tuple[Chain, ...]
    """From modules that the code imports itself, whose full names come first."""
    attributes: frozenset[str]
    """All names of attributes, of whatever object."""


def named_by(code: CodeType) -> Named:
    """O(instructions) the first time."""
    known = _known.get(code)
    if known is None:
        if len(_known) >= _MOST:
            _known.clear()
        known = _known[code] = _read(code)
    return known


_known: Final[dict[CodeType, Named]] = {}
_MOST: Final = 4096  # entries; all are forgotten when there are more
_BETWEEN: Final = frozenset({"PUSH_NULL", "CACHE", "EXTENDED_ARG", "PRECALL", "COPY_FREE_VARS", "NOP"})


def _read(code: CodeType) -> Named:
    chains: dict[Chain, None] = {}
    imported: dict[Chain, None] = {}
    attributes: set[str] = set()
    local: dict[str, Chain] = {}
    """Names that the code binds to what it imports."""
    parts = [code]
    for part in parts:  # it grows
        parts += [inner for inner in part.co_consts if isinstance(inner, CodeType)]
        chain: Chain = ()
        into = chains
        module = ""
        bound: Chain = ()
        for instruction in get_instructions(part):
            what, name = instruction.opname, instruction.argval
            if what in _BETWEEN:
                continue
            if what in ("LOAD_ATTR", "LOAD_METHOD"):
                attributes.add(name)
                chain = (*chain, name) if chain else ()
                continue
            if chain:
                into[chain] = None
            chain, into = (), chains
            if what in ("LOAD_GLOBAL", "LOAD_NAME"):
                chain = (name,)
            elif what == "IMPORT_NAME":
                module, bound = name, (name.partition(".")[0],)
            elif what == "IMPORT_FROM":
                bound = (module, name)
            elif "_FAST" in what or "_DEREF" in what or what == "STORE_NAME":
                names = name if isinstance(name, tuple) else (name,)  # two in one instruction, since Python 3.13
                if what.startswith("STORE_") and bound:
                    local.setdefault(names[0], bound)
                    bound = ()
                if "LOAD_" in what and names[-1] in local:
                    chain, into = local[names[-1]], imported
        if chain:
            into[chain] = None
    return Named(tuple(chains), tuple(imported), frozenset(attributes))
