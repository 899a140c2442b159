"""Hypothesis strategies: pipelines that use everything the surface offers, and that shrink to what matters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from lib.array_code import LINES, fill
from lib.array_programs import DTYPES as DTYPES_OF_ARRAYS
from lib.array_programs import LAYOUTS, SHAPES, Line, Make, letters
from lib.programs import (
    FICKLE,
    FUNCTIONS,
    Apply,
    Budget,
    Detach,
    Drop,
    Evict,
    Gather,
    Get,
    Hold,
    LetGo,
    Pin,
    Program,
    ReleaseMemory,
    Source,
    Step,
    Together,
    Unpin,
)

DEVICES = ("cpu", "gpu:0")
POLICIES = ("needed", "dtr", "dtr-eq", "dtr-local", "lru", "size", "msps", "random", "none")
SEARCHES = ("exact", "sample", "ignore small", "batch")
COMMON = ("add", "scale", "add", "halves")
RELEASES = ("eager", "ignore", "banish")


def references() -> SearchStrategy[int]:
    """A value, by its position among those not dropped; recent ones, counted from the end, as often as early ones."""
    return st.integers(-4, 6)


def sources(devices: tuple[str, ...] = DEVICES) -> SearchStrategy[Source]:
    return st.builds(Source, st.lists(st.integers(0, 9), max_size=5).map(tuple), st.sampled_from(devices))


def applications(*, fickle: bool = True, faults: bool = True, declared: bool = True) -> SearchStrategy[Apply]:
    """Operations; `fickle` ones take other memory in every run, `faults` strike in the first to the fourth run."""
    names = [name for name in (*FUNCTIONS, *3 * COMMON) if fickle or name not in FICKLE]
    hidden = st.lists(references(), min_size=1, max_size=2).map(tuple)
    rarely: Any = st.one_of(st.just(()), st.just(()), st.just(()), st.just(()), hidden)
    return st.builds(
        Apply,
        st.sampled_from(names),
        st.lists(references(), max_size=3).map(tuple),
        st.sampled_from(("plain", "plain", "list", "dict", "nested", "keyword", "applied")),
        st.sampled_from((0,) * 12 + (2, 3, 4, 1)) if faults else st.just(0),
        rarely,
        st.sampled_from(("get", "evict", "apply")),
        st.sampled_from((None,) * 6 + (0, 8, 40)) if declared else st.none(),
        st.sampled_from((1, 1, 0, 2, 10)),
    )


def steps(
    *,
    devices: tuple[str, ...] = DEVICES,
    threads: bool = False,
    faults: bool = True,
    fickle: bool = True,
    declared: bool = True,
) -> SearchStrategy[Step]:
    """One step of a pipeline."""
    applied: SearchStrategy[Step] = applications(fickle=fickle, faults=faults, declared=declared)
    got: SearchStrategy[Step] = st.builds(Get, references())
    several = st.lists(references(), max_size=3).map(tuple)
    threaded = st.builds(Together, st.lists(references(), min_size=2, max_size=4).map(tuple))
    weighted: list[tuple[int, SearchStrategy[Step]]] = [
        (2, sources(devices)),
        (12, applied),
        (6, got),
        (3, st.builds(Evict, references())),
        (2, st.builds(Drop, references())),
        (1, st.builds(Pin, references())),
        (2, st.builds(Unpin, references())),
        (1, st.builds(Detach, references())),
        (3, st.builds(Hold, references())),
        (1, st.just(LetGo())),
        (1, st.builds(Gather, several, st.sampled_from(("list", "tuple", "dict", "iterator", "traverse")))),
        (1, st.builds(Budget, st.integers(60, 200))),
        (1, st.builds(ReleaseMemory, st.one_of(st.none(), st.integers(1, 60)), st.sampled_from(devices))),
        (2 if threads else 0, threaded),
    ]
    choices = [strategy for weight, strategy in weighted for _ in range(weight)]
    return st.integers(0, len(choices) - 1).flatmap(lambda index: choices[index])


def programs(
    *,
    most: int = 40,
    devices: tuple[str, ...] = DEVICES,
    threads: bool = False,
    faults: bool = True,
    fickle: bool = True,
    declared: bool = True,
) -> SearchStrategy[Program]:
    """Whole pipelines of up to `most` steps: DAGs of operations with everything that may happen to their values."""
    one = steps(devices=devices, threads=threads, faults=faults, fickle=fickle, declared=declared)
    short, long = st.lists(one, max_size=most // 2), st.lists(one, min_size=most // 2, max_size=most)
    starts = st.lists(sources(devices), max_size=2)
    return st.tuples(starts, st.one_of(short, long, long)).map(lambda parts: Program((*parts[0], *parts[1])))


def settings_of_caches() -> SearchStrategy[dict[str, Any]]:
    """The choices of a cache but for its budget: `Cache(budget, **settings)`."""
    return st.fixed_dictionaries(
        {
            "policy": st.sampled_from(POLICIES),
            "search": st.sampled_from(SEARCHES),
            "release": st.sampled_from(RELEASES),
            "verify": st.sampled_from((False, False, False, True)),
        }
    )


# Array programs


@st.composite
def array_lines(draw: DrawFn, lines: dict[str, tuple[str, ...]] = LINES) -> Line:
    """One line of array code; `lines` are the templates that it may be made from."""
    template = draw(st.sampled_from(lines[draw(st.sampled_from(list(lines)))]))
    code = fill(template, lambda options: draw(st.sampled_from(options)))
    return Line(code, tuple([draw(st.integers(0, 7)) for _ in letters(code)]))


@st.composite
def array_programs(
    draw: DrawFn,
    *,
    most: int = 12,
    dtypes: Sequence[str] = DTYPES_OF_ARRAYS,
    lines: dict[str, tuple[str, ...]] = LINES,
) -> Program:
    """Sources, mostly of shapes and dtypes that go together, and up to `most` lines over them."""
    shape, dtype = draw(st.sampled_from(SHAPES)), draw(st.sampled_from(dtypes))
    sources = st.builds(
        Make,
        st.one_of(st.just(dtype), st.sampled_from(dtypes)),
        st.one_of(st.just(shape), st.sampled_from(SHAPES)),
        st.integers(0, 4),
        st.sampled_from(LAYOUTS),
    )
    steps: list[Step] = [*draw(st.lists(sources, min_size=1, max_size=4))]
    steps += draw(st.lists(array_lines(lines), min_size=1, max_size=most))
    return Program(steps)
