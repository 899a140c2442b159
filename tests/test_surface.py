"""The surface: what is exported, what importing costs, how values print and travel, and what costs and events mean."""

from __future__ import annotations

import ast
import asyncio
import copy
import pickle
import subprocess
import sys
import threading
import warnings
from collections import namedtuple
from collections.abc import Generator, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any

import pytest

import recompute as rc
import recompute.testing
from lib.vectors import vector
from recompute._engine.events import Accessed, Added, Evicted, Forgotten, LetGo, Performed, Released, TakenBack
from recompute.testing import EventLog, Identity, ManualClock, check_invariants

HOUSE = Path(rc.__file__).parent


def unit(*arguments: Any, **more: Any) -> int:
    return 1


def test_what_is_exported() -> None:
    """The public names, and that each is there."""
    assert rc.__all__ == sorted(rc.__all__)
    assert {
        "BudgetError",
        "Cache",
        "Disk",
        "Host",
        "ImpureError",
        "RandomWarning",
        "Recomputable",
        "RecomputableArray",
        "SizeWarning",
        "StagingError",
        "Stats",
        "ThrashWarning",
        "ap",
        "array",
        "available",
        "current_cache",
        "default_cache",
        "lift",
        "memoize",
        "namespace",
        "pure",
        "register_size",
        "report",
        "sequence",
        "set_default_cache",
        "sizeof",
        "planned",
        "stage",
        "traverse",
    } == set(rc.__all__)
    for name in rc.__all__:
        assert getattr(rc, name) is not None
    assert recompute.testing.__all__ == [
        "EventLog",
        "Identity",
        "ManualClock",
        "check_adapter",
        "check_arrays",
        "check_invariants",
    ]


def test_small_operations_are_hinted_at() -> None:
    """Of a thousand operations that take microseconds the figures say so; of others they do not."""
    clock = ManualClock()
    for cost, hinted in ((6e-6, True), (6e-3, False)):
        with rc.Cache(clock=clock) as cache:
            for number in range(1000):
                assert ("hint" in str(cache.stats())) is False, number
                rc.ap(clock.advance, cost)
            assert ("an operation takes 6 us on average" in str(cache.stats())) is hinted


def test_the_identity_has_the_same_surface() -> None:
    """Each function of the module and each method of a Recomputable is an attribute of Identity."""
    for name in ("pure", "ap", "lift", "sequence", "traverse"):
        assert callable(getattr(Identity, name))
    for name in dir(rc.Recomputable):
        if not name.startswith("_") and name not in ("number", "cache", "engine", "node"):
            assert hasattr(Identity, name), name


def run_alone(code: str, status: int = 0) -> str:
    """What a fresh interpreter prints, which finds nothing but the standard library and this checkout."""
    told = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {str(HOUSE.parent)!r}); {code}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert told.returncode == status, told.stdout
    return told.stdout.strip()


@pytest.mark.parametrize("module", ["recompute", "recompute.testing"])
def test_importing_loads_no_framework(module: str) -> None:
    """Neither a framework nor what is slow to import comes along."""
    unwanted = (
        "numpy", "torch", "jax", "cupy", "autograd", "pandas", "pyarrow", "polars", "xarray", "dask", "PIL", "scipy",
        "hypothesis", "pytest", "psutil", "matplotlib", "rich", "importlib.metadata",
    )  # fmt: skip
    assert run_alone(f"import {module}; print([name for name in {unwanted!r} if name in sys.modules])") == "[]"


def run_a_copy(folder: Path, code: str) -> str:
    """What a program says on stderr that finds a copy of the package, together with files of the other `recompute`."""
    copytree(HOUSE, folder / "recompute", ignore=ignore_patterns("__pycache__"))
    for name in ("bundle", "cmd", "config", "instance", "process", "recompute", "remote", "utils"):
        (folder / "recompute" / f"{name}.py").write_text("")
    told = subprocess.run([sys.executable, "-S", "-c", code], cwd=folder, capture_output=True, text=True)
    assert told.returncode == 1
    return told.stderr


CURE = "pip uninstall recompute recompute-cache && pip install . in a checkout"


def test_the_other_distribution_is_named_where_both_are_installed(tmp_path: Path) -> None:
    """`import recompute` over what the distribution `recompute` has left is one clear error with the cure."""
    said = run_a_copy(tmp_path, "import recompute").splitlines()[-1]
    assert said.startswith("ImportError: two distributions are mixed up in ")
    assert CURE in said


def test_the_command_names_the_other_distribution_that_has_overwritten_the_package(tmp_path: Path) -> None:
    """Where the other `__init__.py` has come later, the command says the same instead of a name that is missing."""
    code = "import pathlib; pathlib.Path('recompute/__init__.py').write_text(''); import recompute._cli"
    assert CURE in run_a_copy(tmp_path, code).splitlines()[-1]


MODULES = ("adapters", "events", "extend", "pictures", "planners", "policies", "simulator", "testing", "text", "traces")


def test_public_modules_come_when_they_are_used() -> None:
    """`import recompute` loads those alone that its own functions need; each is there when it is asked for."""
    early = "[name for name in sorted(sys.modules) if name.partition('.')[2] in public]"
    code = f"import recompute; public = {MODULES!r}; print({early})"
    assert run_alone(code) == "['recompute.text']"  # which errors and warnings of the core are made of
    late = (
        "recompute._cli",
        "recompute._arrays",
        "recompute._memoize",
        "recompute._pictures",
        "recompute._sight",
        "recompute._staging",
        "recompute._tiers.disk",
        "recompute._traces",
        "recompute._watching",
        "recompute._plans",
        "recompute._simulator",
        "concurrent.futures",
    )
    assert run_alone(f"import recompute; print([name for name in {late!r} if name in sys.modules])") == "[]"
    assert run_alone("import recompute as rc; print(rc.simulator.simulate.__name__, rc.testing.Identity(3).get())") == (
        "simulate 3"
    )
    for name in MODULES:
        assert getattr(rc, name) is import_module(f"recompute.{name}")
        assert name in dir(rc)
    assert run_alone("from recompute import *; print(array.__name__, Disk.__name__)") == "array Disk"
    assert set(rc.__all__) < set(dir(rc))


def test_a_name_that_is_not_there() -> None:
    """An AttributeError as of any module, with a suggestion if there is one."""
    for name, meant in (("simulater", "simulator"), ("pur", "pure"), ("zzzzzzzz", None)):
        with pytest.raises(AttributeError, match=f"^module 'recompute' has no attribute '{name}'$"):
            getattr(rc, name)
        told = run_alone(f"import recompute; recompute.{name}", status=1)
        quoted = f": {meant!r}" if sys.version_info < (3, 15) else f" '.{meant}' instead of '.{name}'"
        suggestion = f". Did you mean{quoted}?" if meant else ""
        assert told.splitlines()[-1] == f"AttributeError: module 'recompute' has no attribute '{name}'{suggestion}"
    assert not hasattr(rc, "__wrapped__")
    with pytest.raises(ImportError, match="cannot import name"):
        from recompute import simulater  # type: ignore[attr-defined]  # noqa: F401


LAYERS = {
    "base": "_form _cython _errors _interrupts _locks _budget text _workers _terminal _background _live",
    "protocol": """_adapters.sizes _adapters.python _adapters.remembering _adapters.packing
        _adapters.generators _adapters.kind _adapters.adapter _adapters.result_sizes _adapters.arrays""",
    "tiers": "_tiers.link _tiers.tier _tiers.host _tiers.disk _tiers.tiers",
    "policy": "_policy.candidate _policy.formulas _policy.tournament _policy.search",
    "graph": """_engine.options _engine.states _engine.functions _engine.graph _engine.neighbours _engine.needed
        _engine.sizes _engine.arguments _engine.events _engine.verify
        _engine.reach _engine.reachable _engine.randomness""",
    "parts": """_engine.changes _engine.device_tiers _engine.finalizer _engine.stats _engine.advice _engine.journal
        _engine.meter _engine.story _engine.frames _engine.pool _engine.machine _engine.memory _engine.scheduler
        _engine.moving _engine.results _engine.runs _engine.references _engine.settling _engine.ahead
        _engine.destroyed _engine.forking""",
    "engine": "_engine.recount _engine.thrashing _engine.engine _engine.requests _engine.extension",
    "surface": """_context _handle _logged _watching _cache _described _forgotten _recomputable _applicative
        _memoize extend events policies adapters""",
    "traces": """_traces.program _traces.chain _traces.published _traces.recorded _traces.read _traces.write traces""",
    "simulator": """_simulator.tier _simulator.run _simulator.neighbourhoods _simulator.published _simulator.replay
        _simulator.published_replay _simulator.simulate _simulator.many simulator""",
    "plans": """_plans.schedule _plans.problem _plans.liveness _plans.timeline _plans.chen _plans.chains
        _plans.exact _plans.future _plans.improve _plans.checkmate _plans.own _plans.verify _plans.fetching _plans.plan
        planners""",
    "foresight": """_foresight.recording _foresight.script _foresight.follower _foresight.planning
        _foresight.repetition _foresight.rounds""",
    "pictures": """_pictures.style _pictures.bars _pictures.residency _pictures.memory _pictures.overheads
        _pictures.chain pictures""",
    "arrays": """_arrays.sharing _arrays.operate _arrays.writes _arrays.dispatch _arrays.attributes _arrays.array
        _arrays.namespace""",
    "sight": """_sight.recording _sight.nest _sight.perfetto _sight.speedscope _sight.memory_viz _sight.exports
        _sight.look _sight.study _sight.curve _sight.page _sight.report
        _sight.why _sight.story""",
    "staging": "_staging.arguments _staging.graph _staging.planned",
    "testing": """testing._clock testing._identity testing._log testing._invariants testing.conformance testing.arrays
        testing""",
    "package": "recompute",
    "command": """_cli.output _cli.plugins _cli.arguments _cli.points _cli.simulate _cli.export _cli.report _cli.story
        _cli.recording _cli.caches _cli.program _cli.demo _cli.doctor _cli.plan _cli.plot _cli.compare _cli.run _cli
        __main__""",
}
"""The house from below: a module imports only what stands on a line above its own, or before it on its own."""

FOR_TYPES = {
    "_engine.randomness": "_engine.graph",  # what an operation draws
    "_engine.ahead": "_engine.moving",  # says that the program has waited
    "_foresight.rounds": "_cache",  # it has one
    "_engine.machine": "_engine.finalizer _engine.frames",  # it counts what departs, and locks
    "_engine.memory": "_engine.device_tiers",  # whose part they are
    "_engine.pool": "_engine.graph _engine.needed _engine.advice _engine.frames",  # the pool that a storage is in
    "_engine.engine": """_engine.frames _engine.scheduler _engine.recount _engine.settling _engine.thrashing
        _engine.ahead _engine.destroyed _engine.forking _engine.advice _engine.randomness""",  # whose part they are
    "_sight.why": "_cache",
    "_engine.device_tiers": "_engine.graph",  # what a tier has of a value
    "_engine.finalizer": "_engine.graph _engine.device_tiers",  # what a storage leaves when it is held outside
    "_engine.neighbours": "_engine.graph",  # the component that a storage is in
    "_adapters.adapter": "_adapters.kind",  # whose methods it holds
    "_adapters.arrays": "_adapters.adapter _adapters.kind",  # an adapter says whether it is one of arrays
    "_cache": "_context _handle _watching",
    "_recomputable": "_cache",  # whose values have stories
    "_traces.write": "_cache",
    "_arrays.array": "_arrays.dispatch",
}
"""What modules below it import, for annotations alone."""

WHEN_CALLED = {
    "_foresight.rounds": "_cache",  # most programs do not need it
    "_cache": "_context",  # the default cache is made when it is first needed
    "_sight.why": "_cache",  # what a cache shows of itself is loaded when it is wanted
    "_traces.write": "_cache",  # few caches write a trace
    "_arrays.namespace": "_arrays.array _arrays.attributes",  # an array knows its namespace, and how it is wrapped
    "recompute": "_traces.write",  # the version, for the header of a trace
}
"""What functions of modules below it import when they are called."""


def name_of(path: Path) -> str:
    """`_engine.graph` of recompute/_engine/graph.py; the package itself is `recompute`."""
    parts = path.relative_to(HOUSE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "recompute"


TREES = {name_of(path): ast.parse(path.read_text()) for path in sorted(HOUSE.rglob("*.py"))}
"""The modules of the house."""


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(module of the house, when it is imported): "import", "types" or "call"."""
    stack: list[tuple[ast.AST, str]] = [(tree, "import")]
    while stack:
        node, when = stack.pop()
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "recompute":
            package = (node.module or "").removeprefix("recompute").removeprefix(".")
            for alias in node.names:
                inner = f"{package}.{alias.name}".removeprefix(".")
                yield (inner if inner in TREES else package or "recompute"), when
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "recompute":
                    yield alias.name.removeprefix("recompute.") or "recompute", when
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            stack.extend((part, "types") for part in node.body)
            stack.extend((part, when) for part in node.orelse)
        else:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                when = "call"
            stack.extend((part, when) for part in ast.iter_child_nodes(node))


def test_every_module_has_its_place() -> None:
    """The table is complete, and every module says its one idea in its first line."""
    order = " ".join(LAYERS.values()).split()
    assert len(order) == len(set(order))
    assert {name for name, tree in TREES.items() if len(tree.body) > 1} == set(order)
    for name, tree in TREES.items():
        first = ast.get_docstring(tree)
        assert first, f"{name} has no docstring"
        assert len(first.splitlines()[0]) > 15, f"{name} does not say what it is"


def test_imports_run_downwards() -> None:
    """No module imports one above it: neither itself, nor for types or when called, but for what is listed."""
    order = {name: position for position, name in enumerate(" ".join(LAYERS.values()).split())}
    upwards: dict[str, dict[str, set[str]]] = {"import": {}, "types": {}, "call": {}}
    for name in order:
        for other, when in imports(TREES[name]):
            assert other in order, f"{name} imports {other}, which has no place in the table"
            if order[other] >= order[name]:
                upwards[when].setdefault(other, set()).add(name)
    assert upwards["import"] == {}
    assert upwards["types"] == {name: set(below.split()) for name, below in FOR_TYPES.items()}
    assert upwards["call"] == {name: set(below.split()) for name, below in WHEN_CALLED.items()}


def test_who_imports_the_engine() -> None:
    """The engine and the policies themselves, the surface, and testing; adapters import nothing private at all."""
    inside = set(" ".join(LAYERS[layer] for layer in ("graph", "policy", "parts", "engine", "surface")).split())
    for name, tree in TREES.items():
        if name not in inside and name.partition(".")[0] not in ("recompute", "testing"):
            private = {other for other, _ in imports(tree) if other.startswith(("_engine", "_policy"))}
            private -= {"_policy.candidate", "_policy.search"}  # they know numbers, and nothing of a cache
            assert not private, f"{name} imports {private}: is it not in extend, events, policies or text?"
    for path in (*ADAPTERS, *(HOUSE.parent / "docs" / "examples").rglob("*.py")):
        private = {other for other, _ in imports(ast.parse(path.read_text())) if other.startswith("_")}
        assert not private, f"{path} imports {private}"


FRAMEWORKS = {"autograd", "cupy", "dask", "jax", "numpy", "pandas", "tensorflow", "torch"}


def test_the_core_imports_no_framework() -> None:
    """Not in functions, either: adapters know them."""
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                modules.append(node.module or "")
            found = FRAMEWORKS.intersection(module.partition(".")[0] for module in modules)
            assert not found, f"{name} imports {found}"


def test_the_policy_is_a_leaf() -> None:
    """Numbers in, victim out: it knows nothing of the engine."""
    for name in LAYERS["policy"].split():
        others = {other for other, _ in imports(TREES[name])}
        assert others <= {*LAYERS["policy"].split(), "text"}, f"{name} imports {others}"


ADAPTERS = sorted((HOUSE.parent / "adapters").rglob("*.py"))

INSPECTED = {
    "_engine.results": "_reads_outline",  # of the class of a Recomputable
    "_handle": "_class_of_results",  # what is made of instances of a subclass of Recomputable
    "testing._invariants": "_missing _missing_bytes _needed_by _needs",  # are a policy's sums what they should be?
    "testing.conformance": "_registered",  # what served a type before goes on to do so
}
"""Private names that tools of tests look at."""


def private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in ("_", "_make")  # of named tuples


def owned(tree: ast.AST) -> set[str]:
    """The private names that a file gives to something: a function, a class, a variable, an attribute of `self`."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Assign(targets=[ast.Name(id="__slots__")]):
                found.update(str(part.value) for part in ast.walk(node.value) if isinstance(part, ast.Constant))
            case ast.Name(id=name, ctx=ast.Store()) | ast.alias(asname=str(name)):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                found.add(name)
    return {name for name in found if private(name)}


def used(tree: ast.AST) -> set[str]:
    """The private names that a file takes from something: attributes of what is not `self`, and imports."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")) | ast.Attribute(value=ast.Call(ast.Name("super"))):
                pass
            case ast.Attribute(attr=name):
                found.add(name)
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] == "recompute":
                found.update(alias.name for alias in node.names if not (HOUSE / f"{alias.name}.py").exists())
    return {name for name in found if private(name)}


def test_what_is_private_stays_in_its_folder() -> None:
    """A private name of the house is used by the files of the folder that gives it; by others on `self` alone."""
    rooms: dict[str, set[str]] = {}
    for name, tree in TREES.items():
        rooms.setdefault(name.partition(".")[0], set()).update(owned(tree))
    house = set().union(*rooms.values())
    core = {"_engine", "_node"}  # of caches and Recomputables: for all of the library, but for no adapter
    taken = {name: used(tree) & house - rooms[name.partition(".")[0]] - core for name, tree in TREES.items()}
    assert {name: names for name, names in taken.items() if names} == {
        name: set(names.split()) for name, names in INSPECTED.items()
    }
    adapters: dict[Path, dict[Path, ast.Module]] = {}
    for path in ADAPTERS:
        adapters.setdefault(path.parent, {})[path] = ast.parse(path.read_text())
    for room in adapters.values():
        theirs = set().union(*map(owned, room.values()))
        for path, tree in room.items():
            assert not used(tree) & house - theirs, f"{path}: {used(tree) & house - theirs} are private to the house"


def test_reprs() -> None:
    """What prints tells what it is, how large, and in what state."""
    with rc.Cache("1 MB") as cache:
        x = rc.pure(vector(1, 2))
        y = rc.ap(vector, 3, nbytes=2000)
        assert repr(x) == "<Recomputable source: resident, 16 B>"
        assert repr(y) == "<Recomputable vector: resident, 2 kB>"
        assert repr(y.pin()).endswith("pinned, 2 kB>")
        y.unpin().evict()
        assert "evicted" in repr(y)
        assert repr(cache) == "<Cache (policy needed): 16 B used of 1 MB, 1 evictions>"
        assert "unlimited" in repr(rc.Cache())
        assert "gpu:0" in repr(rc.Cache({"gpu:0": "1 GB"}))
        assert "lambda" in repr(rc.ap(lambda: 1))
        assert "vector" in repr(rc.ap(partial(partial(vector, 1), 2)))
        assert "test_reprs" in repr(rc.ap(lambda: 1)._node.operation)


def test_a_copy_and_a_pickle_are_sources() -> None:
    """The value travels, its history does not; copies of containers work, too."""
    with rc.Cache():
        y: rc.Recomputable[list[int]] = rc.ap(list, (1, 2))
        y.evict()
        for other in (copy.copy(y), copy.deepcopy(y), pickle.loads(pickle.dumps(y))):
            assert other is not y
            assert other.get() == [1, 2]
            assert "source" in repr(other)
            assert not other.evict()
        assert copy.deepcopy({"a": [y]})["a"][0].get() == [1, 2]


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize("surface", [rc, Identity])
def test_values_inside_containers_are_dependencies(surface: Any) -> None:
    """Tuples, named tuples, lists and dicts, nested, among positional and keyword arguments."""

    def look(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    one, two = surface.ap(int, "1"), surface.ap(int, "2")
    y = surface.ap(look, one, (two, "a"), [one, [two]], {"k": (one,), 3: None}, Point(one, 7), p=one, q=[two])
    for value in (y, one, two):
        value.evict()
    args, kwargs = y.get()
    assert args == (1, (2, "a"), [1, [2]], {"k": (1,), 3: None}, Point(1, 7))
    assert type(args[4]) is Point
    assert kwargs == {"p": 1, "q": [2]}


@pytest.mark.parametrize("surface", [rc, Identity])
def test_containers_are_copied_when_the_operation_is_made(surface: Any) -> None:
    """What the caller, or the function, does to a list afterwards changes no later run."""

    def consume(items: list[int]) -> int:
        total = 0
        while items:
            total += items.pop()
        return total

    items = [surface.pure(1), 2, 3]
    y = surface.ap(consume, items)
    items.clear()
    y.evict()
    assert y.get() == 6
    y.evict()
    assert y.get() == 6


@pytest.mark.parametrize("surface", [rc, Identity])
def test_a_list_that_contains_itself(surface: Any) -> None:
    """It has no end, and is refused by name."""
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ValueError, match="contains itself"):
        surface.ap(unit, endless)


@pytest.mark.parametrize("surface", [rc, Identity])
def test_lift_in_all_its_forms(surface: Any) -> None:
    """A wrapper, a decorator, a decorator with arguments; names and documentation stay."""

    @surface.lift  # type: ignore[untyped-decorator]  # a surface is Any
    def add(a: int, b: int = 1) -> int:
        """The sum."""
        return a + b

    @surface.lift(nout=2)  # type: ignore[untyped-decorator]  # it gives Any
    def split(a: int) -> tuple[int, int]:
        return a // 10, a % 10

    assert add.__name__ == "add"
    assert add.__doc__ == "The sum."
    assert add(1).get() == 2
    assert add(surface.pure(2), b=surface.pure(3)).get() == 5
    assert [value.get() for value in split(surface.pure(42))] == [4, 2]
    assert surface.lift(max)(surface.pure(1), 5).get() == 5


@pytest.mark.parametrize("surface", [rc, Identity])
def test_a_function_that_is_a_value(surface: Any) -> None:
    """ap of a Recomputable, and its method apply, call what it holds."""
    f = surface.pure(lambda a, b=0: a + b)
    assert surface.ap(f, surface.pure(1), b=2).get() == 3
    assert f.apply(1, b=surface.pure(2)).get() == 3
    assert [value.get() for value in surface.pure(divmod).apply(7, 3, nout=2)] == [2, 1]


@pytest.mark.parametrize("surface", [rc, Identity])
@pytest.mark.parametrize("value", [None, False, 0, "", (), [], ValueError("kept"), object, 10**400, b"x" * 10**6])
def test_any_object_is_a_value(surface: Any, value: Any) -> None:
    """None, exceptions, classes, nothing and much: as sources, as results, evicted or not."""
    assert surface.pure(value).get() is value
    y = surface.ap(lambda: value)
    y.evict()
    assert y.get() is value
    assert surface.ap(lambda payload: payload is value, y).get() is True


def test_values_of_two_caches_do_not_mix() -> None:
    """An operation belongs to one cache; the error says how to pass a value over."""
    one, two = rc.Cache(), rc.Cache()
    with one:
        x = rc.pure(1)
    with two:
        y = rc.pure(2)
        with pytest.raises(ValueError, match="two caches"):
            rc.ap(max, x, y)
        assert rc.ap(max, x.get(), y).get() == 2


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("tasks", [False, True])
def test_generators_that_hold_a_cache_open(first: int, same: bool, tasks: bool) -> None:
    """Generators that wait inside of `with cache:` may be closed in any order: what is open last is current."""

    def waiting(cache: rc.Cache) -> Generator[None, None, None]:
        with cache:
            yield

    def program() -> None:
        caches = [rc.Cache()] * 2 if same else [rc.Cache(), rc.Cache()]
        generators = [waiting(cache) for cache in caches]
        for generator in generators:
            next(generator)
        generators[first].close()
        assert rc.current_cache() is caches[1 - first]
        generators[1 - first].close()
        assert rc.current_cache() is around

    async def task() -> None:
        program()

    async def together() -> None:
        await asyncio.gather(task(), task())
        assert rc.current_cache() is around

    with rc.Cache() as around:
        asyncio.run(together()) if tasks else program()
        assert rc.current_cache() is around
    assert rc.current_cache() is rc.default_cache()


def test_a_generator_that_is_closed_in_another_thread() -> None:
    """It leaves the current cache of that thread as it is."""

    def waiting() -> Generator[None, None, None]:
        with rc.Cache():
            yield

    def work() -> None:
        with rc.Cache() as own:
            generator.close()
            found.append(rc.current_cache() is own)
        found.append(rc.current_cache() is rc.default_cache())

    found: list[bool] = []

    def begin() -> None:
        next(generator)

    generator = waiting()
    for step in (begin, work):
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
    assert found == [True, True]


def test_the_current_cache() -> None:
    """The innermost `with`, or the default one, which can be replaced; arguments say more than either."""
    outer, inner = rc.Cache(), rc.Cache()
    before = rc.current_cache()
    with outer:
        x = rc.pure(1)
        with inner:
            assert rc.current_cache() is inner
            y = rc.ap(unit, x)
        assert rc.current_cache() is outer
    assert rc.current_cache() is before is rc.default_cache()
    assert outer.stats().operations == 1
    assert y.get() == 1
    mine = rc.Cache()
    rc.set_default_cache(mine)
    try:
        assert rc.current_cache() is mine
    finally:
        rc.set_default_cache(before)


class Work:
    """Operations that take time on a manual clock."""

    def __init__(self, **options: Any) -> None:
        self.clock = ManualClock()
        self.cache = rc.Cache(clock=self.clock, **options)

    def __call__(self, seconds: float, *payloads: Any) -> int:
        self.clock.advance(seconds)
        return len(payloads)


def test_costs_exclude_nested_rematerialization() -> None:
    """A function that gets an evicted value is not billed for bringing it back."""
    work = Work()
    with work.cache, EventLog(work.cache) as log:
        x = rc.ap(work, 10.0)
        x.evict()

        def outer() -> int:
            work(1.0)
            x.get()
            work(2.0)
            return 1

        y = rc.ap(outer)
        costs = [(event.cost, event.again) for event in log.performed()]
    assert costs == [(10.0, False), (10.0, True), (3.0, False)]
    stats = work.cache.stats()
    assert (stats.model_time, stats.remat_time) == (13.0, 10.0)
    assert stats.overhead == pytest.approx(23 / 13)
    assert work.cache._engine.meter.now == 23.0
    assert y.get() == 1


def test_costs_exclude_operations_made_inside() -> None:
    """Nor for operations that the function makes."""
    work = Work()
    with work.cache, EventLog(work.cache) as log:

        def outer() -> Any:
            work(1.0)
            return rc.ap(work, 5.0).get()

        rc.ap(outer)
        assert [event.cost for event in log.performed()] == [5.0, 1.0]


def test_a_cheaper_second_run_is_the_cost() -> None:
    """The first run of a compiled function is not its cost; a dearer one changes nothing."""
    work = Work()
    times = iter([9.0, 2.0, 5.0])
    with work.cache:
        y = rc.ap(lambda: work(next(times)))
        operation = y._node.operation
        assert operation is not None
        costs = [operation.c0]
        for _ in range(2):
            y.evict()
            y.get()
            costs.append(operation.c0)
        check_invariants(work.cache, [y])
    assert costs == [9.0, 2.0, 2.0]
    assert work.cache.stats().recomputed[0].times == 2
    assert work.cache.stats().recomputed[0].seconds == 7.0


def test_sizes_are_learnt_by_function_and_shapes() -> None:
    """Room is made before the second run of a function on such arguments: the budget holds from then on."""

    def double(payload: Any) -> Any:
        return vector(*(2 * number for number in payload.numbers))

    cache = rc.Cache(100)
    with cache:
        x = rc.pure(vector(1, 2, 3))
        kept = [rc.ap(double, x) for _ in range(20)]
        assert cache.stats().peak <= 100
        assert cache.stats().overshoot == 0
        short = rc.pure(vector(1))
        kept += [rc.ap(double, short) for _ in range(20)]
        assert cache.stats().peak <= 100
        check_invariants(cache, [x, short, *kept])


def test_declared_sizes_are_believed() -> None:
    """nbytes counts, whatever the adapter would say: one for all outputs, or one each."""
    cache = rc.Cache(100)
    with cache:
        y = rc.ap(vector, 1, nbytes=60)
        assert cache.stats().used == 60
        a, b = rc.ap(lambda: (1, 2), nout=2, nbytes=[10, 20])
        assert cache.stats().used == 90
        c, d = rc.ap(lambda: (1, 2), nout=2, nbytes=5)
        assert cache.stats().used == 100
        assert cache.stats().peak <= 100
        kept = [y, a, b, c, d]
        assert all(value.resident for value in kept)
        check_invariants(cache, kept)


def test_a_get_inside_an_operation_is_a_dependency() -> None:
    """Found at run time, remembered: it stays alive for the operation, and its eviction is a neighbour's."""
    cache = rc.Cache()
    with cache, EventLog(cache) as log:
        x = rc.ap(vector, 1, 2)
        box = [x]
        y = rc.ap(lambda: vector(len(box[0].get())))
        assert log.performed()[-1].arguments == (x.number,)
        x.evict()
        y.evict()
        log.clear()
        assert y.get() == vector(2)
        assert log.names() == ["vector", log.names()[-1]]
        check_invariants(cache, [x, y])


def test_events_tell_what_happened() -> None:
    """A source, a run, an eviction, a rerun, a value taken back, a value forgotten: each with time and bytes."""
    clock = ManualClock()
    cache = rc.Cache(clock=clock)

    def slow(payload: Any) -> Any:
        clock.advance(2.0)
        return vector(*payload.numbers)

    with cache, EventLog(cache) as log:
        x = rc.pure(vector(1, 2))
        y = rc.ap(slow, x)
        y.evict()
        held = y.get()
        y.evict()
        assert y.get() is held
        number = y.number
        del y, held
    ran = (number,), (16,), (x.number,), (number,), (number,), (x.number,), "cpu", None
    slow_name = "test_events_tell_what_happened.slow"
    assert log.events == [
        Added(0.0, 16, x.number, 16, "cpu"),
        Performed(2.0, 32, slow_name, 2.0, False, *ran),
        Evicted(2.0, 16, number, 16, "request"),
        Performed(4.0, 32, slow_name, 2.0, True, *ran),
        Accessed(4.0, 32, number),
        Evicted(4.0, 32, number, 16, "request", True, (number,)),
        TakenBack(4.0, 32, number, 16),
        Accessed(4.0, 32, number),
        Released(4.0, 32, number),
        Forgotten(4.0, 32, number),
        LetGo(4.0, 16, number),
    ]
    del x
    assert len(log) == 11


def test_a_listener_that_raises_is_dropped() -> None:
    """With a warning; the run and the other listeners go on."""
    cache = rc.Cache()

    def bad(event: Any) -> None:
        raise RuntimeError("no")

    cache.subscribe(bad)
    with cache, EventLog(cache) as log:
        with pytest.warns(RuntimeWarning, match="will hear no more"):
            x = rc.pure(1)
        y = rc.ap(unit, x)
        assert len(log) == 2
        assert y.get() == 1


def test_a_listener_that_leaves_and_raises() -> None:
    """It has gone already: only the warning remains."""
    cache = rc.Cache()

    def leaving(event: Any) -> None:
        stop()
        raise RuntimeError("no")

    stop = cache.subscribe(leaving)
    with cache, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert rc.pure(1).get() == 1
    stop()


def test_a_listener_may_use_the_cache() -> None:
    """Events come after the lock is released."""
    cache = rc.Cache()
    seen: list[Any] = []

    def curious(event: Any) -> None:
        seen.append(type(event).__name__)
        assert cache.stats().used in (0, 16)

    cache.subscribe(curious)
    with cache:
        y = rc.ap(vector, 1, 2)
        y.evict()
        assert y.get() == vector(1, 2)
    assert seen == ["Performed", "Evicted", "Performed", "Accessed"]


def test_statistics_are_a_snapshot() -> None:
    """They compare, and do not change."""
    with rc.Cache() as cache:
        before = cache.stats()
        assert before == cache.stats()
        y = rc.ap(vector, 1, 2)
        assert before.used == 0
        after = cache.stats()
        assert (after.used, after.peak, after.operations, after.overhead) == (16, 16, 1, 1.0)
        y.evict()
        y.get()
        assert cache.stats().recomputed[0].function == "vector"
        assert cache.stats().rematerializations == 1


def test_wrong_choices_are_named() -> None:
    """A release mode or a clock that is none."""
    with pytest.raises(ValueError, match="choose from ignore, eager, banish"):
        rc.Cache(release="lazy")  # type: ignore[arg-type]  # on purpose
    with pytest.raises(TypeError, match="clock"):
        rc.Cache(clock=3.0)  # type: ignore[arg-type]  # on purpose


def test_pins_and_evictions_say_what_they_did() -> None:
    """evict is True only if something was dropped; pin brings a value back and keeps it."""
    with rc.Cache() as cache:
        x, y = rc.pure(vector(1)), rc.ap(vector, 2)
        assert not x.evict()
        assert y.evict()
        assert not y.evict()
        assert y.pin() is y
        assert y.resident
        assert y.pinned
        assert not y.evict()
        assert y.pin().pinned
        assert y.unpin() is y
        assert not y.pinned
        assert y.evict()
        assert y.unpin().pinned is False
        check_invariants(cache, [x, y])


def test_a_manual_clock_runs_only_forwards() -> None:
    """Time stands still, or is told to pass."""
    clock = ManualClock(1.0)
    assert (clock(), clock()) == (1.0, 1.0)
    clock.advance(2.5)
    assert clock() == 3.5
    with pytest.raises(ValueError, match="backwards"):
        clock.advance(-1)
    assert repr(clock) == "ManualClock(3.5)"
