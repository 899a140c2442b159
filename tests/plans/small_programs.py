"""Random small programs with views, several results, zero sizes, sources that come and go, and values that are got."""

from __future__ import annotations

from hypothesis import strategies as st

from recompute._traces.program import Program


@st.composite
def programs(draw: st.DrawFn, operations: int = 7, uniform: bool = False) -> Program:
    """A program of at most so many operations. `uniform`: one new value each, no views, no `get`, sources that stay."""
    program = Program("random")
    values = [program.add_source(draw(st.integers(0, 2))) for _ in range(draw(st.integers(1, 2)))]
    made: list[int] = []
    for _ in range(draw(st.integers(1, operations))):
        if not uniform and draw(st.integers(0, 3)) == 0:
            values.append(program.add_source(draw(st.integers(0, 3))))
        arguments = draw(st.lists(st.sampled_from(values[-4:]), min_size=1, max_size=3))
        if made and draw(st.booleans()):
            arguments.append(draw(st.sampled_from(made)))
        storages: list[int] = []
        if not uniform and draw(st.integers(0, 4)) == 0:
            storages.append(program.storages[arguments[0]])
        for _ in range(1 if uniform else draw(st.integers(0 if storages else 1, 2))):
            storages.append(program.add_storage(draw(st.integers(1 if uniform else 0, 4))))
        results = program.add_call("f", arguments, storages, float(draw(st.integers(0, 5))))
        values += results
        made += results
        if not uniform and draw(st.integers(0, 4)) == 0:
            program.steps.append(("get", draw(st.sampled_from(made))))
        sources = [value for value in values if program.makers[value] < 0]
        if not uniform and len(values) > 1 and sources and draw(st.integers(0, 3)) == 0:
            gone = draw(st.sampled_from(sources))
            program.steps.append(("drop", gone))
            values.remove(gone)
        if not uniform and draw(st.integers(0, 8)) == 0:
            program.steps.append(("detach", draw(st.sampled_from(made))))
    program.outputs = draw(st.lists(st.sampled_from(made), max_size=2, unique=True))
    return program


def whole(program: Program) -> int:
    """Bytes of all storages together: more than any plan needs."""
    return 2 * sum(program.sizes) + 2
