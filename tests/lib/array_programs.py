"""Array programs as data: lines of array code over a pool of arrays, run on plain arrays and on wrapped ones.

A program means the same on both: what changes an array in place changes its views, too, reads its operands first, and
does nothing if it fails. Both runs must agree in every result, its type, dtype, shape, order in memory and bits, and in
what they raise.
"""

from __future__ import annotations

import ast
import builtins
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from random import Random
from types import CodeType
from typing import Any, Final
from weakref import ref

from lib.array_code import LINES as LINES
from lib.array_code import fill
from lib.array_code import lines_for as lines_for
from lib.programs import LOST, Observation, Program, Step, observed
from recompute._adapters.adapter import kinds
from recompute._adapters.arrays import ArrayAdapter
from recompute._arrays.array import RecomputableArray
from recompute._arrays.namespace import array, namespace
from recompute._arrays.writes import library_writes
from recompute._cache import Cache
from recompute._errors import BudgetError
from recompute._tiers.host import Host
from recompute.testing import check_arrays, check_invariants
from recompute.testing.arrays import DTYPES as DTYPES
from recompute.testing.arrays import LAYOUTS as LAYOUTS
from recompute.testing.arrays import Layout, can_be_written, geometry, new
from recompute.testing.arrays import serving as serving

SHAPES: Final = ((3,), (), (2, 3), (3, 3), (1,), (0,), (1, 3), (2, 1), (2, 2, 3), (0, 3), (2, 3, 3), (1, 1, 1))
LARGEST: Final = 100  # elements; what is larger is looked at, but not used again


@dataclass(frozen=True, repr=False)
class Make(Step):
    """A source. Seed 0: counts from 1; 1: what is special to the dtype; others: any numbers."""

    dtype: str
    shape: tuple[int, ...] = ()
    seed: int = 0
    layout: Layout = "C"


@dataclass(frozen=True, repr=False)
class Line(Step):
    """A line of code. Its one-letter names stand, in alphabetic order, for operands.

    A capital letter is the same operand as the small one, where the line changes it.
    """

    code: str
    operands: tuple[int, ...] = ()


# Programs


def random_line(random: Random, lines: dict[str, tuple[str, ...]] = LINES) -> Line:
    """Any line, of any part of the language."""
    code = fill(random.choice(lines[random.choice(list(lines))]), random.choice)
    return Line(code, tuple([random.randrange(8) for _ in letters(code)]))


def random_program(
    random: Random,
    length: int = 12,
    dtypes: Sequence[str] = DTYPES,
    lines: dict[str, tuple[str, ...]] = LINES,
) -> Program:
    """Two to four sources, some of one shape or dtype, and lines."""
    shapes, kinds = [random.choice(SHAPES), *SHAPES], [random.choice(dtypes), *dtypes]
    sources = [
        Make(
            kinds[random.randrange(len(kinds)) * random.randrange(2)],
            shapes[random.randrange(len(shapes)) * random.randrange(2)],
            random.randrange(5),
            random.choice(LAYOUTS),
        )
        for _ in range(random.randint(2, 4))
    ]
    return Program((*sources, *(random_line(random, lines) for _ in range(length))))


def letters(code: str) -> tuple[str, ...]:
    """The operands of a line."""
    return _compiled(code)[1]


@lru_cache(4096)
def _compiled(code: str) -> tuple[CodeType, tuple[str, ...], str]:
    """The code object, the letters of the operands, and those of them that are changed."""
    tree = ast.parse(code)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in "abcdABCD"}
    operands = tuple(sorted({name.lower() for name in names}))
    changed = "".join(sorted(name.lower() for name in names if name.isupper()))
    kind = "eval" if len(tree.body) == 1 and isinstance(tree.body[0], ast.Expr) else "exec"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        return compile(code, "<line>", kind), operands, changed


# The interpreter

_ASSIGNMENT: Final = re.compile(r"[A-D]\[.*\] .*=")


class Arrays:
    """Runs programs on plain arrays, or, within a cache, on wrapped ones.

    `dispatch`: whether lines call the functions of the library itself, which then has to hand them over for wrapped
    arrays; otherwise they call those of `recompute.namespace`.
    """

    def __init__(self, adapter: ArrayAdapter, cache: Cache | None = None, *, dispatch: bool = False) -> None:
        self.adapter = adapter
        self.cache = cache
        self.pool: list[Any] = []
        self._unchanged: list[int] = []  # what a line should have changed, but could not
        self._stuck: list[Any] = []  # NumPy's ufuncs keep an operand forever if the function that they call raises
        self._suspects: list[ref[Any]] = []  # operands of which it may have been so
        self._library = adapter.namespace()
        self._scope = {
            "__builtins__": builtins,
            "xp": self._library if cache is None or dispatch else namespace(self._library),
            "new": lambda *how: new(self._library, *how),
            "plain": self._plain,
        }

    @property
    def handles(self) -> list[RecomputableArray]:
        """The wrapped arrays that there are."""
        suspects = [value() for value in self._suspects]
        return [value for value in [*self.pool, *self._stuck, *suspects] if isinstance(value, RecomputableArray)]

    def do(self, step: Step) -> Observation:
        """One step, and what can be observed of it."""
        return observed(partial(self._do, step), self.cache)[:2]  # what an error says may name the wrapper

    def content(self, position: int) -> Observation:
        """One array of the pool."""
        value = self.pool[position]
        if value is LOST:
            return ("lost",)
        wrapped = isinstance(value, RecomputableArray)
        return observed(lambda: ("value", *self._content(value.get() if wrapped else value)))

    def keep_up(self, other: Arrays) -> None:
        """Let the pool be as large as another one, of plain arrays: what could not be made, or changed, is lost."""
        self.pool += [LOST] * (len(other.pool) - len(self.pool))
        if self._unchanged:
            buffers = [self.adapter.buffer(value) if kinds[type(value)].array else None for value in other.pool]
            memories = [buffers[position] for position in self._unchanged if buffers[position] is not None]
            for position, buffer in enumerate(buffers):
                if any(buffer is memory for memory in memories):
                    self.pool[position] = LOST
        self._unchanged.clear()

    def _do(self, step: Step) -> Observation:
        match step:
            case Make(dtype, shape, seed, layout):
                made: Any = LOST
                try:
                    source = new(self._library, dtype, shape, seed, layout)
                    made = source if self.cache is None else array(source)
                finally:
                    self.pool.append(made)
                return ("done",)
            case Line(code, operands):
                return self._line(code, operands)
        raise TypeError(f"{step!r} is not a step of an array program")

    def _line(self, code: str, operands: tuple[int, ...]) -> Observation:
        compiled, names, changes = _compiled(code)
        if not self.pool:
            return ("done",)
        where = {name: value % len(self.pool) for name, value in zip(names, operands, strict=True)}
        changed = {name: where[name] for name in changes}
        written_to = [self.pool[position] for position in changed.values() if self.pool[position] is not LOST]
        if len({id(array) for array in written_to}) < len(written_to):
            return ("done",)  # it is undefined what it means to write two results to one array
        scope = self._scope | {name: self.pool[position] for name, position in where.items()}
        if any(scope[name] is LOST for name in where):
            self._lose(changed)
            return ("lost",)
        for name in changes:
            scope[name.upper()] = scope[name] if self.cache is not None else self._assigned_to(scope[name], code)
        written = [scope[name.upper()] for name in changes]
        before = []
        if changes and self.cache is None:
            if not all(self.adapter.constant(value) or _allows_writes(value) for value in written):
                return REFUSED
            before = [self.adapter.clone(value) for value in written]
            scope |= {name: self.adapter.clone(scope[name]) for name in where}
        try:
            result = eval(compiled, scope)
        except BudgetError:
            self._stuck += [scope[name] for name in where]
            self._lose(changed)
            raise
        except Exception:
            for value, content in zip(written, before, strict=False):
                self._restore(value, content)
            wrapped = [scope[name] for name in where if isinstance(scope[name], RecomputableArray)]
            self._suspects += map(ref, wrapped)
            raise
        for name, position in changed.items():
            self.pool[position] = scope[name.upper()]
        for name in (*where, *map(str.upper, changes)):
            del scope[name]  # a function in the line, which its result's recipe knows, knows the scope
        return ("result", self._describe(result, written))

    def _assigned_to(self, plain: Any, code: str) -> Any:
        """A plain operand that is changed: a scalar may be assigned to."""
        return self._library.asarray(plain) if self.adapter.constant(plain) and _ASSIGNMENT.match(code) else plain

    def _restore(self, plain: Any, content: Any) -> None:
        """What fails changes nothing, not even a part."""
        cls: Any = type(plain)
        if not self.adapter.constant(plain) and _allows_writes(plain) and library_writes(cls, plain.dtype):
            plain[...] = content

    def _lose(self, changed: dict[str, int]) -> None:
        for position in changed.values():
            self.pool[position] = LOST
            self._unchanged.append(position)

    def _describe(self, result: Any, written: list[Any]) -> Any:
        """A result, without the content of arrays; these go to the pool."""
        for number, value in enumerate(written):
            if result is value:
                return ("operand", number)
        if isinstance(result, (tuple, list)):
            return type(result).__name__, *[self._describe(value, written) for value in result]
        if isinstance(result, dict):
            return "dict", *[(key, self._describe(value, written)) for key, value in result.items()]
        wrapped = isinstance(result, RecomputableArray)
        if not wrapped and not kinds[type(result)].array:
            return type(result).__name__, repr(result)
        if result.size <= LARGEST and not written:
            self.pool.append(result)
        outline = result._outline() if wrapped else result
        cls = result._type if wrapped else type(result)
        return "array" if wrapped or self.cache is None else "unwrapped", cls.__name__, *geometry(outline)

    def _plain(self, x: Any) -> Any:
        """The content of a result that is no wrapped array, if the library itself was called."""
        if isinstance(x, RecomputableArray):
            return "wrapped" if self._scope["xp"] is self._library else self._content(x.get())
        return self._content(x)

    def _content(self, x: Any) -> tuple[Any, ...]:
        digest = self.adapter.fingerprint(x)
        return type(x).__name__, *geometry(x), None if digest is None else digest.hex(), repr(x)


def _allows_writes(plain: Any) -> bool:
    """What the array itself says; none whose elements lie on each other."""
    strides = getattr(plain, "strides", None) or ()
    apart = 0 in plain.shape or all(step or length == 1 for step, length in zip(strides, plain.shape, strict=False))
    return apart and getattr(getattr(plain, "flags", None), "writeable", True)


REFUSED: Final = ("error", "read-only")
"""A plain array that is a view of less memory: who changes it gets an error, though of this kind or that."""


def matches(found: Observation, expected: Observation) -> bool:
    """Whether a step on wrapped arrays did what it did on plain ones."""
    return found == expected or (expected == REFUSED and found[0] == "error")


def difference(
    program: Iterable[Step],
    adapter: ArrayAdapter,
    cache: Cache,
    *,
    dispatch: bool = False,
    after: Callable[[Arrays], None] | None = None,
) -> str | None:
    """Where a program on wrapped arrays differs from the same on plain ones, if it does; running short does not count.

    `after` is called after each step, with the run on wrapped arrays.
    """
    plain, wrapped = Arrays(adapter), Arrays(adapter, cache, dispatch=dispatch)
    raised = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, step in enumerate(program):
            expected, found = plain.do(step), wrapped.do(step)
            wrapped.keep_up(plain)
            raised = raised or found[0] in ("error", "short")
            if not matches(found, expected) and found[0] not in ("short", "lost"):
                return f"step {number}, {step!r}: expected {expected}, found {found}"
            if after is not None:
                after(wrapped)
        cache.budget = None
        for position in range(len(plain.pool)):
            expected, found = plain.content(position), wrapped.content(position)
            if found != expected and found[0] != "lost":
                return f"array {position} of the pool: expected {expected}, found {found}"
        check_invariants(cache, wrapped.handles)
    if cache.release == "ignore" or (raised and dispatch):  # see `_stuck`
        return None
    wrapped.pool.clear()
    wrapped._stuck.clear()
    used = cache.stats().used
    return f"{used} bytes are left" if used else None


def shrunk(program: Program, fails: Callable[[Program], object]) -> Program:
    """A part of a program that fails as the whole does, and would not without any of its steps."""
    steps = list(program)
    for position in reversed(range(len(steps))):
        fewer = steps[:position] + steps[position + 1 :]
        if fails(Program(fewer)):
            steps = fewer
    return Program(steps)


def evict_some(random: Random) -> Callable[[Arrays], None]:
    """For `after` in `difference`: evicts every other array of the pool."""

    def evict(arrays: Arrays) -> None:
        for value in arrays.handles:
            if random.random() < 0.5:
                value.evict()

    return evict


# The check


def check_array_programs(
    adapter: ArrayAdapter,
    *,
    programs: int = 100,
    length: int = 12,
    dtypes: Sequence[str] = DTYPES,
    lines: dict[str, tuple[str, ...]] | None = None,
    dispatch: bool = False,
    seed: int = 0,
) -> None:
    """Raise AssertionError, and say what is wrong, if arrays of a library behave otherwise when they are wrapped.

    After `check_arrays`, runs random programs on plain and on wrapped arrays: without a budget, within small ones, with
    evictions after each step, with a tier, and with results verified.

    Parameters
    ----------
    programs, length, seed
        How many programs, how many lines each, and which ones.
    dtypes
        Names of dtypes in the library's namespace.
    lines
        Parts of the language that the programs are made from, as in `LINES`; None: all of that which suits the library,
        `lines_for` arrays that can or cannot be written to.
    dispatch
        Whether the library hands its functions over for wrapped arrays (NEP 13, NEP 18), so that programs can call them
        as they are; otherwise they call those of `recompute.namespace`.
    """
    check_arrays(adapter, dtypes=dtypes)
    with serving(adapter):
        if lines is None:
            lines = lines_for(writable=can_be_written(adapter))
        for number in range(programs):
            program = random_program(Random(seed + number), length, dtypes, lines)
            settings: dict[str, Any] = _SETTINGS[number % len(_SETTINGS)]
            differs = partial(_difference, adapter, settings, number, dispatch=dispatch)
            wrong = differs(program)
            if wrong is not None:
                program = shrunk(program, differs)
                raise AssertionError(f"{adapter!r}, {program!r} with {settings}:\n{differs(program) or wrong}")


_SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"budget": 100},
    {"verify": True},
    {"budget": 300, "release": "ignore", "policy": "lru"},
    {"release": "banish"},
    {"budget": 60, "policy": "random"},
    {"budget": 200, "tiers": Host(always=True)},
)


def _difference(
    adapter: ArrayAdapter, settings: dict[str, Any], number: int, program: Program, *, dispatch: bool
) -> str | None:
    cache = Cache(**settings)
    evict = evict_some(Random(number))

    def after(arrays: Arrays) -> None:
        check_invariants(cache, arrays.handles)
        if number % 2:
            evict(arrays)

    try:
        return difference(program, adapter, cache, dispatch=dispatch, after=after)
    except AssertionError as error:  # the cache's books
        return str(error)
