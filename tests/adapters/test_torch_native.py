"""The native path alone: its builds, its policy, and what gets at memory past the dispatcher.

What both paths do is tested on both by the other modules: see `path` in conftest.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import io
import json
import logging
import math
import os
import pickle
import signal
import stat
import subprocess
import sys
import textwrap
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event, Thread
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the extra 'torch' is not installed")

from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402  # after importorskip

import recompute as rc  # noqa: E402
import recompute_torch as rt  # noqa: E402
from recompute import policies  # noqa: E402
from recompute_torch._native import build, load  # noqa: E402
from recompute_torch._native.block import STEPS  # noqa: E402
from recompute_torch._native.build import Unavailable  # noqa: E402

np = pytest.importorskip("numpy", reason="the extra 'numpy' is not installed")

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(bool(build.status().reason), reason=str(build.status())),
]


# Builds


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of builds with the real one in it."""
    load.library()
    real = build.place()
    monkeypatch.setenv(build.FOLDER_VARIABLE, str(tmp_path))
    for source in (real, real.with_suffix(".json")):
        (tmp_path / source.name).write_bytes(source.read_bytes())
    assert build.check(build.place()) == ""
    return tmp_path


@pytest.mark.parametrize("what", ["torch", "git", "abi", "machine", "source"])
def test_a_build_for_something_else_is_not_loaded(what: str, folder: Path) -> None:
    """Whatever a build does not share with the installed torch and the source, it is no use."""
    record = build.place().with_suffix(".json")
    record.write_text(json.dumps(json.loads(record.read_text()) | {what: "another"}))
    assert "another" in build.check(build.place())


def test_half_a_build_is_not_loaded(folder: Path) -> None:
    """A file that was cut short, or that has no record, is no use."""
    path = build.place()
    path.write_bytes(path.read_bytes()[:-100])
    assert build.check(path) == "it is not what was built"
    path.with_suffix(".json").unlink()
    assert build.check(path) == "there is none"


def test_versions_that_were_not_tried_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is loaded."""
    monkeypatch.setattr(torch, "__version__", "2.14.0+cpu")
    with pytest.raises(Unavailable, match=r"tried with torch 2\.13\.0, .*, and this is 2\.14\.0"):
        build.place()


def test_where_there_is_a_gpu_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build of torch for GPUs is served where there is none."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    with pytest.raises(Unavailable, match="for the CPU alone"):
        build.place()


def in_a_process(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program with these variables of the environment."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


FALLING_BACK = """
    import logging, torch, recompute_torch as rt
    logging.basicConfig(format="%(message)s")
    for _ in range(2):
        with rt.budget() as block:
            assert (torch.ones(4) * 2).sum() == 8
        print(block.stats().path)
    try:
        rt.budget(native=True)
    except RuntimeError as error:
        print(error)
"""


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"CXX": "no-such-compiler"}, "there is no C++ compiler: CXX=no-such-compiler"),
        ({"RECOMPUTE_TORCH_NATIVE": "0"}, "the environment forbids it"),
        ({build.FOLDER_VARIABLE: "/proc/builds"}, "cannot be written to"),
        ({"CXX": "false"}, "failed"),
    ],
    ids=lambda value: "",
)
def test_where_it_cannot_be_built(variables: dict[str, str], reason: str, tmp_path: Path) -> None:
    """The default is the Python path then, which is said once; who asks for the native one is told why not."""
    found = in_a_process(FALLING_BACK, **{build.FOLDER_VARIABLE: str(tmp_path)} | variables)
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert lines[:2] == ["python", "python"]
    assert reason in lines[2]
    said = [line for line in found.stderr.splitlines() if "run on the Python path" in line]
    assert len(said) == ("RECOMPUTE_TORCH_NATIVE" not in variables)


def test_processes_that_start_together_build_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for the first, and take what it has built."""
    built = folder / "real.so"
    build.place().rename(built)
    build.place().with_suffix(".json").unlink()
    compiler, counted = folder / "compiler", folder / "counted"
    compiler.write_text(f'#!/bin/sh\necho once >>{counted}\nwhile [ "$1" != -o ]; do shift; done\ncp {built} "$2"\n')
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    code = "from recompute_torch._native import build; print(build.check(build.build()))"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=os.environ | {"CXX": str(compiler)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    assert [process.communicate(timeout=300)[0] for process in running] == ["\n"] * 3
    assert counted.read_text() == "once\n"


def test_which_path_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default is the native path where it serves, an environment forbids it, and a program has the last word."""
    monkeypatch.delenv("RECOMPUTE_TORCH_NATIVE", raising=False)
    assert [rt.budget(native=native).stats().path for native in (None, True, False)] == ["native", "native", "python"]
    assert isinstance(rt.budget(native=True), rt.budget)
    assert rt.budget(lambda used: 10**9).stats().path == "python"
    with pytest.raises(Unavailable, match="not a function"):
        rt.budget(lambda used: 10**9, native=True)
    other = rt.budget({"cpu": "1GB"})
    steps: list[Any] = []
    other.on_step(steps.append)
    found: list[Any] = []

    def enter() -> None:
        with other as entered:
            found.append(entered is other and other.path)
            assert isinstance(other, rt.budget)
            assert other.budget == {"cpu": 10**9}
            weight = torch.ones(3, requires_grad=True)
            weight.sum().backward()
            torch.optim.SGD([weight]).step()

    with rt.budget() as block:
        assert block.path == other.path == "native"
        thread = Thread(target=enter)
        thread.start()
        thread.join()
        assert block.path == "native"
    assert found == ["python"], "there is one below Python"
    assert len(steps) == 1
    monkeypatch.setenv("RECOMPUTE_TORCH_NATIVE", "0")
    assert rt.budget().path == "python"


@pytest.mark.parametrize(
    "options", [{"trace": "step.jsonl"}, {"tiers": [rc.Host("1GB")]}, {"verify": True}, {"policy": lambda *_: 1.0}]
)
def test_what_it_does_not_serve(options: dict[str, Any]) -> None:
    """Such arguments are refused, with the cure."""
    with pytest.raises(Unavailable, match=r"does not serve.*native=False"):
        rt.budget("1MB", native=True, **options)


def test_an_argument_that_there_is_not() -> None:
    """It is refused as by any function."""
    with pytest.raises(TypeError, match="no argument 'smalest'"):
        rt.budget("1MB", native=True, smalest="1kB")


# The policy


FACTS = st.floats(1e-6, 10.0)


@pytest.mark.parametrize("policy", ["needed", "dtr", "dtr-local", "lru", "size", "msps"])
def test_scores_are_those_of_the_core(policy: Any) -> None:
    """What C++ computes is 1 / score of the core's policy, for all facts and under any pressure."""
    core = policies.policy_of(policy)
    library = load.library()
    with rt.budget(native=True, policy=policy):

        @given(FACTS, FACTS, st.integers(1, 10**9), FACTS, st.integers(0, STEPS))
        def compare(cost: float, neighbours: float, size: int, staleness: float, pressure: int) -> None:
            if core.neighbourhood == "none":
                neighbours = 0.0
            height = library.rm_height(cost, neighbours, size, staleness, pressure)
            score = core.under(pressure / STEPS).score(cost, neighbours, size, staleness)
            assert math.isclose(1 / height, score, rel_tol=1e-9)

        compare()


@pytest.mark.parametrize(("policy", "repeats"), [("needed", 1), ("dtr", 2)])
def test_what_was_released_stays_while_it_is_wanted(policy: Any, repeats: int) -> None:
    """If something evicted is made from it, the default policy has it there; by a published one it is made again."""
    x = torch.ones(2_000)
    with rt.budget(native=True, policy=policy) as block:
        middle = x.exp()
        last = middle.neg()
        before = block.stats().used
        assert load.library().rm_release(2 * middle.nbytes) == 2 * middle.nbytes
        middle.sum()  # brings it back
        del middle
        known = block.stats().rematerializations
        assert last[0].item() == pytest.approx(-math.e)
        assert block.stats().rematerializations == known + repeats
        block.check()
        del last
        assert block.stats().used == before - 2 * x.nbytes


def test_a_recurrent_network_in_half_of_its_memory() -> None:
    """In each step fewer operators run again than there are, though every state is made from the one before."""
    torch.manual_seed(0)
    cell, inputs = torch.nn.LSTMCell(64, 64), torch.randn(60, 32, 64)

    def step() -> None:
        hidden = state = torch.zeros(32, 64)
        loss = torch.zeros(())
        for x in inputs:
            hidden, state = cell(x, (hidden, state))
            loss = loss + hidden.square().mean()
        cell.zero_grad()
        loss.backward()

    with rt.budget(native=True) as block:
        step()
        peak = block.stats().peak
    with rt.budget(peak // 2, native=True) as block:
        for _ in range(3):
            step()
        stats = block.stats()
        block.check()
    assert 0 < stats.rematerializations < stats.operations


def test_an_operator_costs_what_its_fastest_run_took() -> None:
    """Its first run may fill caches or be interrupted: of two values, the one that is quick to make is evicted."""
    library = torch.library.Library("recompute_costs", "DEF")
    library.define("quick_again(Tensor x) -> Tensor")
    library.define("slow(Tensor x) -> Tensor")
    matrix, runs = torch.ones(200, 200), []

    def work(x: Any, times: int) -> Any:
        for _ in range(times):
            matrix.mm(matrix)
        return x * 1

    def quick_again(x: Any) -> Any:
        runs.append(x)
        return work(x, 60 if len(runs) == 1 else 0)

    library.impl("quick_again", quick_again, "CPU")
    library.impl("slow", lambda x: work(x, 6), "CPU")
    with rt.budget(native=True) as block:
        x = torch.ones(2_000)
        quick = torch.ops.recompute_costs.quick_again(x)
        slow = torch.ops.recompute_costs.slow(x)
        block.cache.release_memory()
        slow.sum(), quick.sum()  # brings them back
        work(x, 20)  # neither was used just now
        assert block.cache.release_memory(1) == quick.nbytes
        evicted = [load.library().rm_state(tensor.untyped_storage()._cdata) == 3 for tensor in (quick, slow)]
    assert len(runs) > 1
    assert evicted == [True, False]


def test_nobody_is_evicted_by_the_policy_none() -> None:
    """The budget is a hard limit then."""
    with rt.budget(8_500, native=True, policy="none"):
        x = torch.ones(1000) * 2
        y = x + 1
        with pytest.raises(rc.BudgetError, match=r"aten\.add"):
            x + y


# Ways out of the dispatcher


def by_dlpack(x: Any) -> Any:
    return np.from_dlpack(x)


def by_address(x: Any) -> Any:
    return np.ctypeslib.as_array(ctypes.cast(x.data_ptr(), ctypes.POINTER(ctypes.c_float)), x.shape)


def by_address_of_the_storage(x: Any) -> Any:
    at = x.untyped_storage().data_ptr() + 4 * x.storage_offset()
    return np.ctypeslib.as_array(ctypes.cast(at, ctypes.POINTER(ctypes.c_float)), x.shape)


VIEWS: dict[str, Callable[[Any], Any]] = {
    "numpy": lambda x: x.numpy(),
    "asarray": np.asarray,
    "dlpack": by_dlpack,
    "address": by_address,
    "address of the storage": by_address_of_the_storage,
}
"""They give an array on the memory of a tensor."""


def saved(x: Any) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file)


def in_a_thread(x: Any) -> Any:
    """Added up by a thread that takes no part."""
    found: list[Any] = []
    work.append(lambda: found.append(x + 0))
    more.set()
    done.wait(60)
    done.clear()
    return found[0]


READS: dict[str, Callable[[Any], Any]] = {
    "tolist": lambda x: x.tolist(),
    "item": lambda x: [element.item() for element in x],
    "repr": repr,
    "torch.save": saved,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "deepcopy": copy.deepcopy,
    "torch.tensor": lambda x: torch.tensor([x[0], x[1]]),
    "from_dlpack": lambda x: torch.from_dlpack(x) + 0,
    "bytes of the storage": lambda x: x.untyped_storage().tolist(),
    "storage.clone": lambda x: x.untyped_storage().clone().tolist(),
    "apply_": lambda x: x.clone().apply_(lambda element: element + 1),
    "map_": lambda x: x.clone().map_(x, lambda one, other: one * other),
    "share_memory_": lambda x: x.clone().share_memory_() * 1,
    "data": lambda x: x.data * 1,
    "a thread that takes no part": in_a_thread,
}

work: list[Callable[[], Any]] = []
more, done = Event(), Event()


@pytest.fixture(scope="module", autouse=True)
def stranger() -> Iterator[None]:
    """A thread that was started before every block."""

    def run() -> None:
        while more.wait():
            more.clear()
            if not work:
                return
            work.pop()()
            done.set()

    thread = Thread(target=run)
    thread.start()
    yield
    more.set()
    thread.join()


def same(one: Any, other: Any) -> bool:
    if isinstance(one, (torch.Tensor, np.ndarray)):
        return bool(np.asarray(one).tobytes() == np.asarray(other).tobytes())
    return bool(one == other)


def test_release_memory_takes_what_that_of_a_cache_takes() -> None:
    """A size as text, and the device to release it on: there is nothing on others."""
    with rt.budget(native=True) as block:
        x = torch.ones(1000) * 2
        assert block.cache.release_memory(device="cuda:0") == 0
        assert block.cache.release_memory("1kB", "cpu") == x.nbytes
        assert block.cache.release_memory("1kB") == 0


@pytest.mark.parametrize("name", [*VIEWS, *READS])
def test_a_way_out_of_an_evicted_tensor(name: str) -> None:
    """It finds the content, and so does everything afterwards."""
    way = (VIEWS | READS)[name]
    plain = torch.arange(40.0) * 3
    with rt.budget(native=True) as block:
        x = torch.arange(40.0) * 3
        y = x.sin()
        assert block.cache.release_memory() >= x.nbytes + y.nbytes
        assert load.library().rm_state(x.untyped_storage()._cdata) == 3
        block.cache.release_memory()
        assert same(way(plain), way(x))
        block.cache.release_memory()
        assert torch.equal(y, plain.sin())
        block.check()
    assert torch.equal(x, plain)


class Kept(NamedTuple):
    """An array, and the tensor whose memory it is on."""

    tensor: Any
    array: Any


Step = tuple[str, int, int]
NAMES = ["mul", "add_", "view", "slice", "write", "evict", "sum", "fill_", "drop", *VIEWS, *READS]
PROGRAMS: st.SearchStrategy[list[Step]] = st.lists(
    st.tuples(st.one_of(st.sampled_from(NAMES), st.sampled_from([*VIEWS, "evict", "write"])), *2 * [st.integers(0, 9)]),
    max_size=30,
)


def outcome(program: list[Step], block: rt.budget | None) -> list[Any]:
    """What is in all tensors at the end, and all that was read."""
    tensors, arrays, found = [torch.arange(12.0), torch.ones(12) * 2, torch.tensor([0.5] * 12)], [], []
    for name, a, b in program:
        x, y = tensors[a % len(tensors)], tensors[b % len(tensors)]
        match name:
            case "mul":
                tensors.append(x * y[0])
            case "add_":
                x.add_(y[0].clone())
            case "view":
                tensors.append(x.view(-1))
            case "slice":
                tensors.append(x[b % 4 :] if len(x) > 6 else x)
            case "fill_":
                x.fill_(b)
            case "sum":
                found.append(x.sum().item())
            case "drop":
                if len(tensors) > 2:
                    del tensors[a % len(tensors)]
            case "evict":
                if block is not None:
                    block.cache.release_memory()
            case "write":
                if arrays:
                    arrays[a % len(arrays)].array.reshape(-1)[b % 3 : b % 3 + 2] = b
            case _ if name in VIEWS:
                arrays.append(Kept(x, VIEWS[name](x)))
            case _:
                read = READS[name](x)
                found.append(np.asarray(read).tobytes() if isinstance(read, torch.Tensor) else repr(read))
        if block is not None:
            block.check()
    return [*found, *[tensor.clone() for tensor in tensors], *[np.asarray(array.array).copy() for array in arrays]]


@settings(max_examples=150)
@example([("mul", 0, 1), ("numpy", 3, 0), ("mul", 3, 1), ("write", 0, 1), ("mul", 3, 1), ("evict", 0, 0)])
@example([("mul", 0, 1), ("numpy", 3, 0), ("mul", 3, 1), ("evict", 0, 0), ("write", 0, 1), ("evict", 0, 0)])
@example(
    [("mul", 0, 1), ("mul", 3, 1), ("numpy", 3, 0), ("write", 0, 1), ("mul", 3, 3), ("write", 0, 2), ("evict", 0, 0)]
)
@given(PROGRAMS)
def test_programs_with_ways_out(program: list[Step]) -> None:
    """Writes to memory that got out are seen as in plain torch, and never by what was made from it before."""
    expected = outcome(program, None)
    with rt.budget(native=True) as block:
        found = outcome(program, block)
    assert len(expected) == len(found)
    assert [number for number, pair in enumerate(zip(expected, found, strict=True)) if not same(*pair)] == []


def test_an_error_where_faults_are_not_handled(monkeypatch: pytest.MonkeyPatch) -> None:
    """With RECOMPUTE_TORCH_GUARD=error a read past the dispatcher says what to do, and operators go on."""
    monkeypatch.setenv("RECOMPUTE_TORCH_GUARD", "error")
    with rt.budget(native=True) as block:
        x = torch.ones(40) * 3
        block.cache.release_memory()
        with pytest.raises(RuntimeError, match=r"is evicted.*clone"):
            x.numpy()
        assert x.clone().numpy().sum() == 120
        assert x.numpy().sum() == 120


def test_other_faults_go_their_way() -> None:
    """A program that reads where nothing is dies of that, inside of a block and after it."""
    code = """
        import ctypes, resource, torch, recompute_torch as rt
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with rt.budget(native=True) as block:
            x = torch.ones(100) * 2
            block.cache.release_memory()
            print(x.numpy().sum(), flush=True)
            ctypes.string_at(16, 1)
    """
    found = in_a_process(code)
    assert (found.stdout, found.returncode) == ("200.0\n", -signal.SIGSEGV)


def test_a_handler_of_others_is_put_back() -> None:
    """Python's faulthandler reports a fault inside of a block, and after it."""
    for indent in ("    ", ""):
        code = f"""
import ctypes, faulthandler, resource, torch, recompute_torch as rt
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
faulthandler.enable()
with rt.budget(native=True) as block:
    x = torch.ones(100) * 2
{indent}ctypes.string_at(16, 1)
"""
        found = in_a_process(code)
        assert "Fatal Python error: Segmentation fault" in found.stderr
        assert found.returncode == -signal.SIGSEGV


# The budget, faults and threads


def trained(budget: int | None, native: bool = True) -> tuple[list[Any], Any]:
    """Parameters and losses of a small training with dropout and batch norm."""
    torch.manual_seed(0)
    layers = [
        [torch.nn.Linear(32, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(inplace=True), torch.nn.Dropout(0.2)]
    ] * 6
    model = torch.nn.Sequential(*[layer for block in layers for layer in block])
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(256, 32)
    losses = []

    def steps() -> None:
        for _ in range(3):
            optimizer.zero_grad()
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())

    if not native:
        steps()
        return [*losses, *model.state_dict().values()], None
    with rt.budget(budget, native=True) as block:
        steps()
        stats = block.stats()
    return [*losses, *model.state_dict().values()], stats


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5])
def test_nothing_is_beyond_the_budget(share: float) -> None:
    """All that kernels take is inside, from the first step on, in a program that fits; and all bits are equal."""
    expected, _ = trained(None, native=False)
    _, free = trained(None)
    budget = int(share * free.peak)
    found, stats = trained(budget)
    assert all(map(torch.equal, expected, found))
    assert stats.evictions > 0
    assert (stats.overshoot, stats.peak <= budget) == (0, True)


def test_a_budget_that_is_too_small_in_the_backward() -> None:
    """The error is the library's, names the operator, and the training goes on with a larger budget."""
    x = torch.ones(1000, requires_grad=True)
    with rt.budget(15_000, native=True) as block:
        y = (x * 2).sin()
        block.budget = 9_000
        with pytest.raises(rc.BudgetError, match=r"aten\.\w+.*the budget is 9000 bytes"):
            y.sum().backward()
        block.check()
        block.budget = 40_000
        x.grad = None
        y = (x * 2).sin()
        y.sum().backward()
    assert torch.equal(x.grad, 2 * (x.detach() * 2).cos())


def test_a_write_that_found_no_room() -> None:
    """Nothing is lost: what it would have written to has the content of before."""
    x = torch.rand(1000, generator=torch.Generator().manual_seed(1))
    with rt.budget(13_000, native=True) as block:
        y = x * 3
        with pytest.raises(rc.BudgetError):
            torch.sort(y.clone())
        with pytest.raises(rc.BudgetError):
            y.scatter_add_(0, torch.arange(1000), y.cumsum(0))
        block.check()
        assert torch.equal(y, x * 3)


def test_a_deep_chain() -> None:
    """A hundred thousand evicted values come back, and go, without recursion."""
    with rt.budget(native=True, history=10**6) as block:
        x = torch.ones(16) * 1
        for _ in range(100_000):
            x = x + 1
        block.cache.release_memory()
        assert x[0].item() == 100_001
        del x
        assert load.figures(load.library()).calls == 0
        block.check()


@pytest.mark.parametrize("way", ["operator", "commit"])
def test_an_interrupt_of_a_long_way_back(way: str) -> None:
    """Ctrl-C does not wait until a long history has come back, which can be asked for again afterwards."""

    class Enough(Exception):
        pass

    def stop(*_: Any) -> None:
        raise Enough("really")

    with rt.budget(native=True, history=10**6) as block:
        x = torch.ones(16) * 1
        for _ in range(100_000):
            x = x + 1
        block.cache.release_memory()
        before = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, 0.005)
        try:
            with pytest.raises(Enough, match="really"):
                x.sum() if way == "operator" else block.commit()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert block.stats().rematerializations < 100_000
        block.check()
        assert x[0].item() == 100_001


def test_interrupts_from_a_timer() -> None:
    """Wherever a handler of signals raises, the records agree and the tensors have their content."""

    class Enough(Exception):
        pass

    def handler(*_: Any) -> None:
        raise Enough

    before = signal.signal(signal.SIGALRM, handler)
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) * 0.05
    expected = [x]
    for _ in range(30):
        expected.append((expected[-1] @ x).tanh())
    struck = 0
    try:
        for number in range(40):
            with rt.budget(8 * x.nbytes, native=True) as block:
                made = [x]
                signal.setitimer(signal.ITIMER_REAL, 0.0005 + 0.0003 * number)
                try:
                    while True:
                        made = [x]
                        for _ in range(30):
                            made.append((made[-1] @ x).tanh())
                        made[1].numpy()
                except Enough:
                    struck += 1
                block.check()
                block.budget = None
                assert all(map(torch.equal, made, expected))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert struck == 40


def test_a_process_that_is_forked_off() -> None:
    """In the child evicted tensors have their content, and no budget holds; nothing changes here."""
    with rt.budget(40_000, native=True) as block:
        x = torch.ones(1000) * 2
        block.cache.release_memory()
        child = os.fork()
        if not child:
            many = [x * number for number in range(30)]
            os._exit(0 if float(many[3][0]) == 6 and x.numpy().sum() == 2000 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert x.sum().item() == 2000


def test_a_block_that_is_left_with_too_little_room() -> None:
    """What is alive comes back in some repeats of each call, not in ever more, and is what it was."""

    def states() -> Any:
        found = [torch.ones(256) * number for number in range(3)]
        for _ in range(200):
            found.append(found[-1] * 0.5 + found[-3])
        return found[-40:]

    with rt.budget(native=True) as block:
        last = states()
        block.cache.release_memory()
        block.budget = 6 * 1024
        known = load.figures(load.library())
    repeats = load.figures(load.library()).repeats - known.repeats
    assert all(map(torch.equal, last, states()))
    assert 0 < repeats <= 6 * known.operators + 1000


def test_one_native_block_at_a_time() -> None:
    """Another one is refused with the reason, in any thread."""
    raised: list[str] = []

    def other() -> None:
        try:
            with rt.budget(native=True):
                pass
        except RuntimeError as error:
            raised.append(str(error))

    with rt.budget(native=True) as block:
        thread = Thread(target=other)
        thread.start()
        thread.join()
        assert (torch.ones(3) * 2).sum().item() == 6
        assert block.stats().operations > 0
    assert len(raised) == 1
    assert "there can be only one" in raised[0]


def test_blocks_in_several_threads() -> None:
    """Of blocks that are open at once one is below Python, and each training gets what it would get alone."""
    budgets = [150_000, 150_000, None]
    meet = Barrier(len(budgets), timeout=60)
    found: dict[int, Any] = {}

    def train(seed: int) -> list[Any]:
        generator = torch.Generator().manual_seed(seed)
        weights = [torch.randn(32, 32, generator=generator).requires_grad_() for _ in range(8)]
        optimizer = torch.optim.SGD(weights, lr=1e-2, momentum=0.9)
        for _ in range(8):
            x = torch.ones(64, 32)
            for weight in weights:
                x = torch.tanh(x @ weight)
            (x * x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [weight.detach().clone() for weight in weights]

    def work(number: int) -> None:
        with rt.budget(budgets[number]) as block:
            meet.wait()
            found[number] = block, train(number)
            meet.wait()

    expected = [train(number) for number in range(len(budgets))]
    threads = [Thread(target=work, args=(number,)) for number in range(len(budgets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(block.path for block, _ in found.values()) == ["native", "python", "python"]
    for number, (block, weights) in found.items():
        assert all(map(torch.equal, weights, expected[number]))
        stats = block.stats()
        assert len(block.report().steps) == 8, "an optimizer of another thread has ended a round"
        if budgets[number] is not None:
            assert stats.rematerializations > 0
            assert stats.peak <= 150_000 + stats.overshoot
        assert stats.used == 0


@pytest.mark.parametrize("outer", ["native", "python"])
def test_a_tensor_of_another_block(outer: str) -> None:
    """A thread with a block of its own refuses the tensors of others, which stay what they are."""
    raised: list[str] = []
    mine: list[Any] = []
    used, over = Event(), Event()

    def other() -> None:
        with rt.budget(native=outer != "native") as inner:
            mine.append(torch.ones(1000) * 3)
            for tensor in (theirs, parameter):
                try:
                    tensor + 1
                except RuntimeError as error:
                    raised.append(str(error))
            used.set()
            over.wait(60)
            inner.cache.release_memory()
            assert mine[0].sum().item() == 3000

    parameter = torch.ones(1000)
    with rt.budget(native=outer == "native") as block:
        theirs = parameter * 2
        thread = Thread(target=other)
        thread.start()
        used.wait(60)
        with pytest.raises(RuntimeError, match="belongs to another budget block"):
            mine[0] + 1
        over.set()
        thread.join()
        block.cache.release_memory()
        assert theirs.sum().item() == 2000
        assert mine[0].sum().item() == 3000  # nobody's any more
    assert len(raised) == 2
    assert all("belongs to another budget block" in message for message in raised)


def test_threads_that_outlive_a_block_and_enter_others() -> None:
    """A thread of a pool that took part in a block that has ended takes part in none that follow but its own."""

    def compute(seed: int) -> list[Any]:
        generator = torch.Generator().manual_seed(seed)
        weights = [torch.randn(48, 48, generator=generator).requires_grad_() for _ in range(6)]
        x = torch.ones(48, 48)
        for weight in weights:
            x = torch.tanh(x @ weight)
        x.square().mean().backward()
        return [weight.grad for weight in weights]

    def within(seed: int) -> list[Any]:
        with rt.budget(300_000):
            return compute(seed)

    expected = [compute(seed) for seed in range(12)]
    with ThreadPoolExecutor(3) as pool:
        with rt.budget("2MB"):
            list(pool.map(compute, range(6)))
        for found, known in zip(pool.map(within, range(12)), expected, strict=True):
            assert all(map(torch.equal, found, known))
        with rt.budget("2MB") as block:
            before = block.stats().operations
            list(pool.map(compute, range(6)))
            assert block.stats().operations == before


@pytest.mark.parametrize("native", [True, False])
def test_a_thread_joins_the_blocks_of_who_starts_it(native: bool) -> None:
    """Not those of others, and not while it has one of its own."""
    counted: dict[str, int] = {}

    def operators(block: Any) -> int:
        return int(block.stats().operations)

    def compute(name: str) -> None:
        before = operators(block)
        (torch.ones(10) * 2).exp()
        counted[name] = operators(block) - before

    def own() -> None:
        with rt.budget(native=False) as mine:
            compute("with one of its own")
            assert operators(mine) > 0
        compute("after it")

    def run(target: Callable[..., None], *arguments: Any) -> None:
        thread = Thread(target=target, args=arguments)
        thread.start()
        thread.join()

    def stranger() -> None:
        entered.wait(60)
        run(compute, "of a stranger")

    entered = Event()
    outside = Thread(target=stranger)
    outside.start()
    with rt.budget(native=native) as block:
        entered.set()
        outside.join()
        run(compute, "of a member")
        run(own)
    assert counted["of a stranger"] == counted["with one of its own"] == 0
    assert counted["of a member"] == counted["after it"] > 0


def test_what_was_there_before_and_what_is_left_after() -> None:
    """Memory from before a block counts from its first use; after it nothing counts, and frees are not subtracted."""
    x = torch.ones(1000)
    with rt.budget(native=True) as block:
        assert block.stats().used == 0
        y = x * 2
        assert 8_000 <= block.stats().used < 8_100
    assert block.stats().used == 0
    with rt.budget(native=True) as block:
        del y
        z = x + 1
        assert 8_000 <= block.stats().used < 8_100
        del x
        assert 4_000 <= block.stats().used < 8_100  # z can only be made from it
    assert z.sum().item() == 2000


def test_a_report() -> None:
    """It names the kinds of memory, and the path is in the figures."""
    model = torch.nn.Linear(32, 32)
    optimizer = torch.optim.Adam(model.parameters())
    with rt.budget(native=True) as block:
        model(torch.ones(4, 32)).sum().backward()
        optimizer.step()
        report = block.report()
        assert report.held["parameters"].here == 4 * (32 * 32 + 32)
        assert report.held["gradients"].here == 4 * (32 * 32 + 32)
        assert report.held["optimizer"].here >= 8 * (32 * 32 + 32)
        assert [step.number for step in report.steps] == [1]
        assert report.steps[0].peak > 0
        assert "parameters" in str(block)


def test_it_is_said_that_it_is_built(caplog: pytest.LogCaptureFixture) -> None:
    """`Status` has the path, and doctor's line says so."""
    with caplog.at_level(logging.INFO):
        load.library()
    assert str(build.status()).startswith("native path built: ")
    assert rt.adapter.remark() == str(build.status())


def test_the_memory_of_the_process_follows_the_count() -> None:
    """What is evicted goes back to the system, or to the next tensor: the process takes what the budget says."""
    code = """
        import resource, torch, recompute_torch as rt
        torch.set_num_threads(1)

        def forward(depth):
            x = torch.ones(1024, 1024)
            kept = []
            for _ in range(depth):
                x = x * 1.001 + 1
                kept.append(x)
            return [tensor.sum().item() for tensor in kept]

        with rt.budget("24MB", native=True) as block:
            forward(2)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            forward(30)
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
            assert block.stats().evictions > 20
        print(grown < 24_000_000, flush=True)
    """
    found = in_a_process(code)
    assert found.stdout == "True\n", found.stderr


def test_pages_of_freed_tensors_serve_tensors_of_other_sizes() -> None:
    """Whatever the sizes, no pages are asked for anew; values stay apart, and the process is as large as counted."""
    code = """
        import random, resource, torch, recompute_torch as rt
        torch.set_num_threads(1)
        draw = random.Random(0)
        kept = []

        def faults():
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

        def turn(number):
            while sum(tensor.nbytes for _, tensor in kept) > 30_000_000:
                before, tensor = kept.pop(draw.randrange(len(kept)))
                assert (tensor == before).all()
            kept.append((number, torch.full((draw.randrange(1 << 16, 2_000_000),), number)))

        with rt.budget("64MB", native=True) as block:
            for number in range(200):
                turn(number)
            first, touched, least, most = faults(), 0, resident(), 0
            for number in range(2000):
                turn(number)
                touched += kept[-1][1].nbytes / resource.getpagesize()
                most = max(most, resident())
            print((faults() - first) / touched < 0.1, most - least < 24_000_000, block.stats().evictions, flush=True)
    """
    found = in_a_process(code)
    assert found.stdout == "True True 0\n", found.stderr


@pytest.mark.parametrize("budget", ["8MB", None])
def test_freed_blocks_serve_tensors_of_the_same_size(budget: str | None) -> None:
    """A training that frees all of a step needs no new pages for the next; many sizes take no more than the budget."""
    code = f"""
        import resource, torch, recompute_torch as rt
        torch.set_num_threads(1)
        usage = lambda: resource.getrusage(resource.RUSAGE_SELF)
        model = torch.nn.Sequential(*[torch.nn.Linear(320, 320), torch.nn.Tanh()] * 60)

        def step():
            model(torch.ones(32, 320)).sum().backward()
            model.zero_grad()

        with rt.budget({budget!r}, native=True) as block:
            for _ in range(5):
                step()
            before = usage().ru_minflt
            for _ in range(20):
                step()
            few = usage().ru_minflt - before < 3000  # of the 24,000 pages that their activations take
            before = usage().ru_maxrss
            for size in range(400, 32_000, 200):
                kept = [torch.full((size,), 1.5) for _ in range(500_000 // size)]
            grown = (usage().ru_maxrss - before) * 1024
        print(few, {budget is None} or grown < 8_000_000, block.stats().evictions, flush=True)
    """
    found = in_a_process(code)
    assert found.stdout == "True True 0\n", found.stderr


def test_tensors_that_python_holds_go_with_it() -> None:
    """The commonest operators come as they were written, with no more references to their arguments."""
    with rt.budget(native=True) as block:
        x, y = torch.ones(8, 8), torch.ones(8, 8)
        seen = [weakref.ref(x), weakref.ref(y)]
        made = torch.cat([x + y, x @ y, torch.addmm(x, x, y), x.mul(2).tanh().sum(0, keepdim=True)])
        assert sys.getrefcount(x) == sys.getrefcount(y) == 2
        del x, y
        gc.collect()
        assert [ref() for ref in seen] == [None, None]
        expected = made.tolist()
        block._library.rm_release(made.nbytes)
        assert block.stats().evictions
        assert made.tolist() == expected
        block.check()


def test_threads_share_the_room_that_there_is() -> None:
    """Room that one thread has made, and another one takes first, is made again: no thread exceeds the budget."""
    turns = 400

    def work() -> None:
        for number in range(turns):
            kept = [torch.full((1 << 18,), number) for _ in range(3)]
            assert [tensor[-1].item() for tensor in kept] == [number] * 3

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with rt.budget(8 << 20, native=True) as block:
            threads = [Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert block.stats().overshoot == 0
    assert block.stats().evictions > turns


BESIDE_THREADS = """
    import os, random, threading, torch, recompute_torch as rt
    torch.set_num_threads(1)

    def work(number, over):
        draw, kept = random.Random(number), []
        while not over.is_set():
            x = torch.full((draw.randrange(1, 300_000),), float(number))
            y = (x * 2 + 1).exp_() if draw.random() < 0.3 else torch.sin(x + 1)
            assert torch.cat([x, y]).isfinite().all()
            kept = [*kept[-3:], (number, x)]
            assert all((tensor == known).all() for known, tensor in kept)

    for _ in range(20):
        over = threading.Event()
        with rt.budget("48MB", native=True) as block:
            threads = [threading.Thread(target=work, args=(number, over)) for number in range(4)]
            for thread in threads:
                thread.start()
            for number in range(150):
                assert (torch.ones(200_000) * number)[-1] == number
                if number % 50 == WHEN:
                    child = os.fork()
                    if not child:
                        assert (torch.ones(200_000) * 3 + 1)[-1] == 4
                        os._exit(0)
                    assert os.waitpid(child, 0)[1] == 0
        over.set()
        for thread in threads:
            thread.join()
    print("done", flush=True)
"""


@pytest.mark.parametrize("when", [-1, 25], ids=["ends", "is forked"])
def test_a_block_beside_operators_of_other_threads(when: int) -> None:
    """A block may end, and a process be forked off, while other threads are in the middle of operators."""
    found = in_a_process(BESIDE_THREADS.replace("WHEN", str(when)))
    assert (found.returncode, found.stdout) == (0, "done\n"), found.stderr


def test_a_collective_does_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes would have to take part: what it makes stays."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_gloo_available()):
        pytest.skip("torch was built without gloo")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        with rt.budget(native=True) as block:
            x = torch.ones(100) * 2
            distributed.all_reduce(x)
            y = x * 3
            block.cache.release_memory()
            states = [load.library().rm_state(tensor.untyped_storage()._cdata) & 3 for tensor in (x, y)]
            assert states == [1, 3]
            assert y.sum().item() == 600
    finally:
        distributed.destroy_process_group()


def test_memory_that_the_machine_does_not_have() -> None:
    """What can be evicted goes before an allocation fails, which then says what it says in plain torch."""
    with rt.budget(native=True) as block:
        x = torch.ones(1000) * 2
        with pytest.raises(RuntimeError, match="allocate"):
            torch.empty(1 << 60, dtype=torch.uint8)
        assert block.stats().evictions == 1
        assert x.sum().item() == 2000


def test_a_thread_that_outlives_the_block() -> None:
    """Its operators go on as in plain torch, and belong to no other block."""
    begun, over = Event(), Event()
    found: list[Any] = []

    def run() -> None:
        x = torch.ones(100) * 2
        begun.set()
        over.wait(60)
        found.append((x * 3).sum().item())

    thread = Thread(target=run)
    with rt.budget(native=True):
        thread.start()
        assert begun.wait(60)
    over.set()
    thread.join()
    assert found == [600]
    assert load.figures(load.library()).values == 0


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_function(backend: str) -> None:
    """What torch.compile has made reads past the dispatcher or not, and gives the same."""

    def function(x: Any) -> Any:
        return (x.sin() * 2 + x.cos()).tanh()

    compiled = torch.compile(function, backend=backend)
    plain = torch.linspace(0, 1, 100, requires_grad=True)
    for _ in range(3):
        function(plain * 1).sum().backward()
    inside = torch.linspace(0, 1, 100, requires_grad=True)
    with rt.budget(native=True) as block:
        for _ in range(3):
            y = inside * 1
            block.cache.release_memory()
            z = compiled(y)
            block.cache.release_memory()
            z.sum().backward()
    assert torch.equal(plain.grad, inside.grad)


def test_code_of_others_that_reads_more_than_its_arguments() -> None:
    """A custom operator may use any tensor, by operators and by arrays, while room is made: it is there and stays."""
    library = torch.library.Library("recompute_native", "DEF")
    library.define("mix(Tensor x) -> Tensor")
    there: list[Any] = []

    def mix(x: Any) -> Any:
        array = there[0].numpy()
        found = x * 1
        for _ in range(20):
            found = found * 0.5 + there[1] + there[2].exp()  # each makes room
        return found + torch.from_numpy(array) + there[0]

    library.impl("mix", mix, "CPU")
    size = 10_000

    def run(block: rt.budget | None) -> list[Any]:
        there[:] = [torch.full((size,), 0.1 * number) + 1 for number in range(3)]
        found = []
        for number in range(6):
            found.append(torch.ops.recompute_native.mix(torch.ones(size) * number).sin())
            if block is not None:
                block.cache.release_memory()
        return [*found, *there]

    expected = run(None)
    with rt.budget(14 * 4 * size, native=True) as block:
        found = run(block)
        block.check()
        assert block.stats().rematerializations > 0
        assert all(map(torch.equal, expected, found))
    assert all(map(torch.equal, expected, found))


def test_code_of_others_that_gives_its_argument_other_memory() -> None:
    """What the argument lay on before is there until the operator is over, and the new memory is known from then on."""
    library = torch.library.Library("recompute_other_memory", "DEF")
    library.define("swap(Tensor(a!) x, Tensor y) -> ()")
    expired: list[bool] = []

    def swap(x: Any, y: Any) -> None:
        before = StorageWeakRef(x.untyped_storage())
        x.set_(y.untyped_storage(), 0, y.shape, y.stride())
        expired.append(before.expired())

    library.impl("swap", swap, "CPU")
    with rt.budget(native=True) as block:
        x, y = torch.ones(1000) * 2, torch.ones(1000) * 3
        torch.ops.recompute_other_memory.swap(x, y)
        z = x + y
        block.cache.release_memory()
        assert z.sum().item() == 6000
        x.set_()
        block.check()
    assert expired == [False]


@pytest.mark.parametrize("native", [True, False])
def test_a_step_of_an_optimizer_that_ends_by_an_error(native: bool) -> None:
    """What follows is remembered, and can be evicted, as before the step."""

    def closure() -> float:
        with torch.profiler.record_function("of the closure"):  # torch's own zero_grad does the same
            weight.sum().backward()
        raise KeyboardInterrupt

    weight = torch.ones(10, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    with rt.budget(native=native) as block, torch.no_grad():
        try:
            optimizer.step(closure)
        except KeyboardInterrupt:
            x = torch.ones(1000) * 2
            before = block.stats().evictions
            block.cache.release_memory()
            assert block.stats().evictions > before
        assert x.sum().item() == 2000


def test_a_warning_that_is_an_error(recwarn: pytest.WarningsRecorder) -> None:
    """It comes out of the operator that repeated too much, and the tensors are what they were."""
    warnings.simplefilter("error", rc.ThrashWarning)
    x = torch.eye(64) * 0.9
    with rt.budget(6 * x.nbytes, native=True) as block:
        kept = [x]
        for _ in range(60):
            kept.append((kept[-1] @ x).tanh())

        def read_backwards() -> None:
            while True:
                for tensor in reversed(kept):
                    tensor.sum()

        with pytest.raises(rc.ThrashWarning, match=r"Repeated most: aten\..*Raise the budget"):
            read_backwards()
        block.check()
        block.budget = None
        assert torch.equal(kept[-1], (kept[-2] @ x).tanh())


def test_one_error_that_is_raised_again_and_again() -> None:
    """A reference to a handler's error is not dropped more often than it was taken."""
    error, x = ValueError("again"), torch.eye(16) * 0.9

    def look() -> None:
        raise error

    with rt.budget(native=True) as block:
        made = x
        for _ in range(2000):
            made = (made @ x).tanh()
        block._look_at_repeats = look
        references = []
        for _ in range(4):
            block.cache.release_memory()
            with pytest.raises(ValueError, match="again"):
                block.commit()
            references.append(sys.getrefcount(error))
        block._look_at_repeats = lambda: None
    assert len(set(references)) == 1


# Programs that went wrong


def test_no_room_while_another_error_is_handled() -> None:
    """The error is the same BudgetError, and says where it comes from."""
    with rt.budget(10_000, native=True):
        try:
            raise KeyError("first")
        except KeyError:
            with pytest.raises(rc.BudgetError, match="It needs at least") as raised:
                torch.ones(10_000)
    assert isinstance(raised.value.__context__, KeyError)


@pytest.mark.parametrize("when", ["before", "inside"])
def test_memory_that_is_given_back_past_the_storages(when: str) -> None:
    """oneDNN's own tensors free their memory by the allocator of that moment: across both ends of a block, too."""
    found = in_a_process(
        f"""
        import torch, recompute_torch as rt
        made = [torch.randn(64, 64).to_mkldnn() for _ in range(20 if {when == "before"} else 0)]
        with rt.budget(native=True) as block:
            made.clear()
            kept = [torch.randn(64, 64) * 2 for _ in range(100)]
            made += [torch.randn(50, 70).to_mkldnn() for _ in range(20)]
            assert block.stats().used > 0
        made.clear()
        more = [torch.randn(64, 64).to_mkldnn() for _ in range(20)]
        print(len(more), (kept[0] + 1).shape)
        """
    )
    assert (found.returncode, found.stdout) == (0, "20 torch.Size([64, 64])\n"), found.stderr


def test_profilers_hear_of_all_memory_after_a_block() -> None:
    """What is allocated for a moment is heard to go, oneDNN's scratch included."""
    x, layer = torch.randn(8, 16, 64, 64), torch.nn.Conv2d(16, 16, 5, padding=2)
    with rt.budget(native=True):
        layer(x)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.no_grad(), torch.profiler.profile(activities=activities, profile_memory=True) as found:
        layer(x)
    assert sum(event.self_cpu_memory_usage for event in found.key_averages()) == 0


class Own(torch.Tensor):  # type: ignore[misc]  # torch may not be installed
    """A class with operators of its own, which are torch's."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_dispatch__(function, types, args, kwargs or {})


def negate_sparse(values: Any) -> None:
    """Of one dimension."""
    torch.sparse_coo_tensor(torch.arange(len(values))[None], values, (len(values),), is_coalesced=True).neg_()


def negate_rows(values: Any) -> None:
    """In rows of 64."""
    rows, columns = torch.arange(0, len(values) + 1, 64), torch.arange(64).repeat(len(values) // 64)
    torch.sparse_csr_tensor(rows, columns, values, (len(values) // 64, 64)).neg_()


def triple_nested(values: Any) -> None:
    """Two parts of different shapes."""
    sizes, strides = torch.tensor([[32, 64], [16, 128]]), torch.tensor([[64, 1], [128, 1]])
    torch._nested_view_from_buffer(values, sizes, strides, torch.tensor([0, 2048])).mul_(3.0)


def add_in_a_class(values: Any) -> None:
    """On the same memory."""
    values.as_subclass(Own).add_(1)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("write", [negate_sparse, negate_rows, triple_nested, add_in_a_class])
def test_a_write_through_a_tensor_of_another_kind(write: Callable[[Any], None]) -> None:
    """What lies on the memory of an ordinary tensor writes to it: what was made from it before stays what it was."""

    def program(evict: Callable[[], object]) -> list[Any]:
        values = source.clone()
        made = values * 2
        written = values * 3
        write(values)
        write(written)
        evict()
        return [made + 0, values + 0, written + 0]

    source = torch.randn(4096)
    expected = program(lambda: None)
    with rt.budget(native=True) as block:
        found = program(block.cache.release_memory)
        block.check()
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("steps", [24, 40])
def test_two_buffers_that_are_written_in_turn(steps: int) -> None:
    """Near a budget that is too short a value is not looked for in every order: the program goes on, or is told so."""

    def program() -> list[Any]:
        one, other = torch.zeros(2, steps, 16), torch.zeros(2, steps, 16) * 1
        x, found = start, []
        for step in range(steps):
            one[:, step] = torch.tanh(x @ weight)
            other.index_copy_(1, torch.tensor([step]), (x @ weight)[:, None])
            share = torch.softmax((one[:, : step + 1] @ x[..., None]).squeeze(-1), -1)
            x = (share[..., None] * other[:, : step + 1]).sum(1)
            found.append(x)
        return found

    torch.manual_seed(0)
    weight, start = torch.randn(16, 16), torch.randn(2, 16)
    expected = program()
    with rt.budget(native=True) as block:
        program()
    peak = block.stats().peak
    for share in (0.9, 0.7, 0.6):
        try:
            with rt.budget(int(share * peak), native=True) as block:
                found = program()
                assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
        except rc.BudgetError:
            pass
        stats = block.stats()
        assert stats.rematerializations < stats.operations * (32 * stats.operations + 10_000)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("shift", [4, 8, 16, 32])
def test_memory_of_numpy_that_is_not_aligned(shift: int, native: bool) -> None:
    """Kernels add up in other steps there, so nothing is made again from a copy elsewhere: the bits are the same."""
    memory = np.zeros(200 * 200 * 4 + 256, "u1")
    start = -memory.ctypes.data % 64 + shift
    array = memory[start : start + 160_000].view("f4").reshape(200, 200)
    array[:] = np.random.RandomState(0).randn(200, 200)
    matrix, vector = torch.from_numpy(array), torch.linspace(-1, 1, 200)

    def program(evict: Callable[[], object]) -> list[Any]:
        made = [torch.addmv(vector, matrix, vector), matrix @ vector, torch.nn.functional.linear(vector, matrix)]
        evict()
        return [product + 0 for product in made]

    expected = program(lambda: None)
    with rt.budget(native=native) as block:
        assert all(map(torch.equal, program(block.cache.release_memory), expected))


def test_a_clone_that_waits_for_a_write() -> None:
    """It is an ordinary clone here, since it shares memory of known kinds alone."""
    x = torch.randn(100)
    with rt.budget(native=True) as block:
        y = x * 2
        z = torch._lazy_clone(y)
        y.add_(1)
        block.cache.release_memory()
        assert torch.equal(z, x * 2)
        assert torch.equal(y, x * 2 + 1)


@pytest.mark.parametrize("where", ["rm_open", "_open", "_take_part"])
def test_an_interrupt_as_a_block_is_entered(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block is not open afterwards, and the next one is native, too."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    def opening(given: Any) -> None:
        opened(given)
        raise KeyboardInterrupt

    block, opened = rt.budget(), load.opened
    with monkeypatch.context() as patch:
        if where == "rm_open":
            patch.setattr(load, "opened", opening)
        else:
            patch.setattr(type(block), where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            block.__enter__()
    with rt.budget() as other:
        assert other.path == "native"
        assert (torch.ones(3) * 2).sum().item() == 6
        assert other.stats().operations > 0
    with rt.budget(native=True):
        pass


def test_a_fork_while_other_threads_make_and_drop_small_tensors() -> None:
    """Bytes are counted exactly, and a child goes on: no lock is held by a thread that it does not have."""
    found = in_a_process(
        """
        import os, signal, torch, recompute_torch as rt
        from threading import Event, Thread
        over, wrong = Event(), []

        def make_and_drop(seed):
            kept = [torch.ones(size) * 2 for size in range(1, 300, seed)]
            while not over.is_set():
                for index, tensor in enumerate(kept):
                    kept[index] = tensor * 1
            wrong.extend(tensor for tensor in kept if tensor.sum().item() != 2 * tensor.numel())

        with rt.budget(native=True) as block:
            before = block.stats().used
            threads = [Thread(target=make_and_drop, args=(seed,)) for seed in (3, 5, 7)]
            for thread in threads:
                thread.start()
            for _ in range(200):
                child = os.fork()
                if not child:
                    signal.alarm(60)
                    os._exit(int((torch.ones(8) * 2).sum().item() != 16))
                print(os.waitpid(child, 0)[1], end="")
            over.set()
            for thread in threads:
                thread.join()
            assert block.stats().used == before and not wrong, (block.stats().used, before, wrong)
            block.check()
        """
    )
    assert (found.returncode, found.stdout) == (0, "0" * 200), found.stderr


def test_a_fork_while_another_thread_enters_a_block() -> None:
    """The child has no such thread, and can enter blocks of its own."""
    found = in_a_process(
        """
        import os, signal, torch, recompute_torch as rt
        from threading import Event, Thread
        from recompute_torch._native import load
        held, go, opened = Event(), Event(), load.opened

        def slowly(block):
            held.set()
            go.wait(60)
            opened(block)

        def enter():
            load.opened = slowly
            with rt.budget(native=True):
                pass

        thread = Thread(target=enter)
        thread.start()
        held.wait(60)
        child = os.fork()
        if not child:
            signal.alarm(60)  # a child that waits for a thread that it does not have ends so
            load.opened = opened
            with rt.budget() as block:
                total = (torch.ones(3) * 2).sum().item()
            os._exit(int(total != 6))
        print(os.waitpid(child, 0)[1])
        go.set()
        thread.join()
        """
    )
    assert (found.returncode, found.stdout) == (0, "0\n"), found.stderr
