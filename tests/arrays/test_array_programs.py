"""THE property of arrays: code on wrapped arrays gives what the same code gives on plain ones, to the last bit."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from random import Random
from threading import Thread
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import recompute as rc
from lib.array_code import BLANKS, LINES, fill
from lib.array_programs import (
    DTYPES,
    LAYOUTS,
    Arrays,
    Line,
    Make,
    check_array_programs,
    difference,
    evict_some,
    letters,
    matches,
    random_program,
    serving,
    shrunk,
)
from lib.programs import Program
from lib.strategies import POLICIES, RELEASES, array_programs, settings_of_caches
from recompute.testing import ManualClock, check_arrays, check_invariants
from recompute.testing.arrays import new, numbers

np = pytest.importorskip("numpy", reason="the extra 'numpy' is not installed")

from recompute_numpy import adapter  # noqa: E402  # after importorskip

Settings = dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def _served() -> Iterator[None]:
    """The adapter serves arrays and scalars, whether or not the package is installed."""
    with serving(adapter):
        yield


def agree(
    program: Program, cache: rc.Cache, dispatch: bool = True, after: Callable[[Arrays], None] | None = None
) -> None:
    """Run a program on plain arrays and within a cache: whatever can be seen must be the same, and the books right."""

    def checked(arrays: Arrays) -> None:
        if after is not None:
            after(arrays)
        check_invariants(cache, arrays.handles)

    wrong = difference(program, adapter, cache, dispatch=dispatch, after=checked)
    assert wrong is None, wrong


def short(program: Program, cache: rc.Cache) -> bool:
    """Whether a program runs short of memory."""
    arrays = Arrays(adapter, cache, dispatch=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return any(arrays.do(step)[0] == "short" for step in program)


TAKEN_IN: Program = Program(
    [
        Make("float64", (3,)),
        Line("a.conj()", (0,)),
        Line("xp.piecewise(a, [a > 0], [lambda x: x + 1, 0])", (0,)),
        Line("A += b", (0, 2)),
    ]
)
"""An array, of which there is a view, takes in what a function of the program made of it."""

IMAGINARY: Program = Program([Make("float64", (3,)), Line("a.imag", (0,)), Line("A += b", (1, 0))])
"""NumPy makes it read-only."""

IMAGINARY_OF_A_SCALAR: Program = Program(
    [Make("float64", (3,)), Line("a.std(ddof=1)", (0,)), Line("xp.imag(a)", (1,)), Line("A[0] = 2", (2,))]
)
"""It is a scalar, which has no elements."""


@settings(max_examples=settings().max_examples * 3)
@given(array_programs(), st.booleans())
@example(TAKEN_IN, False)
@example(IMAGINARY, False)
@example(IMAGINARY_OF_A_SCALAR, False)
def test_without_a_budget(program: Program, dispatch: bool) -> None:
    """NumPy's functions and those of the namespace give plain NumPy's results, dtypes, shapes and errors."""
    agree(program, rc.Cache(clock=ManualClock()), dispatch)
    assert not short(program, rc.Cache(clock=ManualClock()))


@settings(max_examples=settings().max_examples * 4)
@given(array_programs(), settings_of_caches(), st.integers(20, 800), st.booleans())
def test_any_budget(program: Program, options: Settings, budget: int, dispatch: bool) -> None:
    """Under any budget, policy, search and release mode each result is NumPy's, or BudgetError is raised."""
    agree(program, rc.Cache(budget, clock=ManualClock(), **options), dispatch)


@settings(max_examples=settings().max_examples * 3)
@given(array_programs(), settings_of_caches(), st.integers(0, 99), st.booleans())
def test_random_eviction(program: Program, options: Settings, seed: int, dispatch: bool) -> None:
    """Every other array is evicted after every step: nothing but time changes."""
    agree(program, rc.Cache(clock=ManualClock(), **options), dispatch, evict_some(Random(seed)))


@settings(max_examples=settings().max_examples * 2)
@given(array_programs(), st.integers(20, 800), st.integers(0, 99), st.sampled_from(RELEASES))
def test_verified(program: Program, budget: int, seed: int, release: Any) -> None:
    """Every repeated run gives the first one's bits, and nothing that is kept is ever changed in place."""
    cache = rc.Cache(budget, verify=True, release=release, clock=ManualClock())
    agree(program, cache, after=evict_some(Random(seed)))


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=max(4, settings().max_examples // 20))
@given(program=array_programs(), share=st.integers(20, 100))
def test_every_policy_and_release_mode(policy: str, release: Any, program: Program, share: int) -> None:
    """Each choice, with programs under a share of what they would use."""
    unlimited = rc.Cache(clock=ManualClock())
    short(program, unlimited)
    budget = max(1, unlimited.stats().peak * share // 100)
    agree(program, rc.Cache(budget, policy=policy, release=release, clock=ManualClock()))


def test_what_a_failing_ufunc_keeps_is_accounted_for() -> None:
    """An operand that NumPy does not let go of after an error is still in the cache when the program has lost it."""
    sources = [Make("float64", (3,))] * 3
    lines = [Line("xp.gcd.accumulate(a)", (0,)), Line("A.fill(b)", (0, 1))]
    agree(Program((*sources, *lines)), rc.Cache(24, release="ignore", clock=ManualClock()))


@given(array_programs(lines={key: LINES[key] for key in ("in place", "assignment", "changing", "out", "indexing")}))
def test_changes_are_seen_by_views_alone(program: Program) -> None:
    """Programs of changes alone, among views of what is changed."""
    agree(program, rc.Cache(clock=ManualClock()), after=evict_some(Random(0)))


@given(array_programs(most=4), st.sampled_from(["complex128", "float64", "float32", "float16", "complex64"]))
def test_nan_payloads(program: Program, dtype: str) -> None:
    """NaNs keep sign and payload, whatever is done to them: arrays are compared by bits."""
    agree(Program((Make(dtype, (13,), 1), *program)), rc.Cache(clock=ManualClock()))


@given(st.lists(array_programs(most=5), min_size=2, max_size=3), st.integers(50, 800))
def test_threads(programs: list[Program], budget: int) -> None:
    """Programs that run in threads of their own, within one cache, do not disturb each other."""
    cache = rc.Cache(budget)
    found: dict[int, list[Any]] = {}

    def work(number: int) -> None:
        arrays, plain = Arrays(adapter, cache, dispatch=True), Arrays(adapter)
        found[number] = []
        for step in programs[number]:
            found[number].append((step, plain.do(step), arrays.do(step)))
            arrays.keep_up(plain)
            evict_some(Random(number))(arrays)
        found[number] += [
            (position, plain.content(position), arrays.content(position)) for position, _ in enumerate(plain.pool)
        ]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        threads = [Thread(target=work, args=(number,)) for number in range(len(programs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for number in range(len(programs)):
        for where, expected, actual in found[number]:
            assert actual[0] in ("short", "lost") or matches(actual, expected), where


# The language


def test_the_kit_passes_numpy() -> None:
    """NumPy's adapter keeps every promise, through NumPy's functions and through the namespace."""
    check_array_programs(adapter, programs=150, dispatch=True)
    check_array_programs(adapter, programs=150, seed=1_000)


@pytest.mark.parametrize("part", LINES)
def test_each_line_means_something(part: str) -> None:
    """Every template makes Python code of it, whatever stands in its blanks; most templates can succeed."""
    random = Random(part)
    succeeded = 0
    for template in LINES[part]:
        assert set(re.findall(r"{([a-z ]+)}", template)) <= {"a", *BLANKS}
        found = set()
        for _ in range(40):
            arrays = Arrays(adapter)
            code = fill(template, random.choice)
            line = Line(code, tuple([random.randrange(8) for _ in letters(code)]))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for source in random_program(random, 0):
                    arrays.do(source)
                found.add(arrays.do(line)[0])
        succeeded += "result" in found
    assert succeeded >= 0.7 * len(LINES[part])


NOT_IN_PROGRAMS = {
    "files": ("save", "savetxt", "savez", "savez_compressed"),
    "no arrays": ("busday_count", "busday_offset", "is_busday", "datetime_as_string", "printoptions"),
    "as they print": ("array_repr",),
    "of dtypes": ("can_cast",),
}


def test_every_function_of_numpy_is_in_the_language() -> None:
    """What NumPy hands over for wrapped arrays is called in programs, but for what is listed with a reason."""
    code = " ".join(template for part in LINES.values() for template in part)
    for name, texts in BLANKS.items():
        code += "".join(f" xp.{text} xp.linalg.{text} xp.fft.{text}" for text in texts if f".{{{name}}}" in code)
    called = set(re.findall(r"xp\.((?:linalg\.|fft\.)?\w+)", code))
    exempt = {name for names in NOT_IN_PROGRAMS.values() for name in names}
    for prefix, module in (("", np), ("linalg.", np.linalg), ("fft.", np.fft)):
        for name in module.__all__:
            function = getattr(module, name)
            if hasattr(function, "_implementation") or isinstance(function, np.ufunc):
                same = {alias for alias in module.__all__ if getattr(module, alias) is function}
                assert {prefix + alias for alias in same} & (called | exempt | {"square"}), name


@given(array_programs())
def test_programs_print_as_code(program: Program) -> None:
    """What a failure shows can be pasted into a test."""
    assert program == eval(repr(program), {"Program": Program, "Make": Make, "Line": Line})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sources(dtype: str, layout: str) -> None:
    """A source has the dtype, shape and layout that it says, and the same numbers each time."""
    for seed in range(4):
        x = new(np, dtype, (2, 3), seed, layout)
        assert x.dtype == dtype
        assert x.shape == (2, 3)
        assert adapter.fingerprint(x) == adapter.fingerprint(new(np, dtype, (2, 3), seed, layout))
    assert len(numbers(dtype, 5, 1)) == 5
    strides = new(np, "float64", (2, 3), 0, layout).strides
    expected = {"F": (8, 16), "reversed": (-24, -8), "strided": (48, 16), "broadcast": (0, 8)}
    assert strides == expected.get(layout, (24, 8))


def test_a_failing_program_shrinks() -> None:
    """To the steps that it cannot do without."""
    program = random_program(Random(0))
    wanted = program[3], program[7]
    assert shrunk(program, lambda steps: all(step in steps for step in wanted)) == wanted


# The kit catches adapters that are wrong in one way


class Shared(type(adapter)):  # type: ignore[misc]  # the adapter's class, unnamed
    def copy(self, value: Any) -> Any:
        return value


class Disordered(type(adapter)):  # type: ignore[misc]  # a class that is found at run time
    def copy(self, value: Any) -> Any:
        return value.copy(order="F")


class Unordered(type(adapter)):  # type: ignore[misc]  # a class that is found at run time
    def empty(self, outline: rc.adapters.Outline) -> Any:
        return np.empty(outline.shape, outline.dtype)


class Copying(type(adapter)):  # type: ignore[misc]  # a class that is found at run time
    def source(self, value: Any) -> Any:
        return value.copy()


class Writable(type(adapter)):  # type: ignore[misc]  # a class that is found at run time
    def result(self, value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return value
        owner = value
        while owner.base is not None:
            owner = owner.base
        return np.lib.stride_tricks.as_strided(owner, value.shape, value.strides) if owner.flags.writeable else value


class Trusting(type(adapter)):  # type: ignore[misc]  # a class that is found at run time
    def snapshot(self, value: Any) -> Any:
        return value


class Rounding(type(adapter)):  # type: ignore[misc]  # a class that is found at run time
    def copy(self, value: Any) -> Any:
        return value.astype("float32").astype(value.dtype)


class Flat(type(adapter)):  # type: ignore[misc]  # a class that is found at run time
    def outline(self, value: Any) -> rc.adapters.Outline:
        return rc.adapters.Outline(type(value), (value.size,), value.dtype, None)


class Constant(type(adapter)):  # type: ignore[misc]  # a class that is found at run time
    def constant(self, value: Any) -> bool:
        return True


class Forgetful(type(adapter)):  # type: ignore[misc]  # a class that is found at run time
    def source(self, value: Any) -> Any:
        return value[..., :1]


@pytest.mark.parametrize(
    "wrong",
    [Shared, Disordered, Unordered, Copying, Writable, Trusting, Rounding, Flat, Constant, Forgetful],
)
def test_a_wrong_adapter_is_caught(wrong: type) -> None:
    """Each adapter that breaks one promise fails, with a message that names it."""
    with pytest.raises(AssertionError, match="adapter numpy"):
        check_arrays(wrong())


def test_a_wrong_function_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs find what differs from plain arrays, and the message shows a short one."""
    monkeypatch.setattr(rc.RecomputableArray, "__neg__", lambda self: +self)
    with pytest.raises(AssertionError, match=r"Line\(code='-a'") as caught:
        check_array_programs(adapter, programs=300, dispatch=True)
    assert str(caught.value).count("Line(") <= 3
