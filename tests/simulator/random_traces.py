"""Random recorded programs: aliases, several outputs, operations of no bytes, values dropped early, late and never."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from recompute._traces.program import Program

SIZES = (1, 2, 3, 5, 8, 0)
COSTS = (1, 2, 3, 7, 20)


@st.composite
def programs(draw: Any, most: int = 25, published: bool = True, drop_sources: bool = False) -> Program:
    """A program whose values are used only while they are referred to, sources to the end unless `drop_sources`."""
    program = Program("random", unit=1e-9, published=published)
    alive = [program.add_source(draw(st.sampled_from(SIZES))) for _ in range(draw(st.integers(1, 2)))]
    for _ in range(draw(st.integers(1, most))):
        recent = draw(st.booleans())
        at = st.integers(max(0, len(alive) - 3), len(alive) - 1) if recent else st.integers(0, len(alive) - 1)
        arguments = [alive[position] for position in draw(st.lists(at, min_size=1, max_size=3))]
        storages: list[int] = []
        for _ in range(draw(st.sampled_from((1, 1, 1, 2, 3)))):
            kind = draw(st.sampled_from(("new", "new", "new", "alias", "sibling")))
            if kind == "alias":
                storages.append(program.storages[draw(st.sampled_from(arguments))])
            elif kind == "sibling" and storages:
                storages.append(storages[-1])
            else:
                storages.append(program.add_storage(draw(st.sampled_from(SIZES))))
        alive += program.add_call("f", arguments, storages, draw(st.sampled_from(COSTS)))
        for value in draw(st.lists(st.sampled_from(alive), max_size=2, unique=True)):
            if len(alive) > 1 and (drop_sources or program.makers[value] >= 0):
                program.steps.append(("drop", value))
                alive.remove(value)
    program.outputs = [value for value in alive if program.makers[value] >= 0]
    return program
