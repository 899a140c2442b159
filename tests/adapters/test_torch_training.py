"""Trainings within a budget: the same bits as in plain torch, flat memory, threads, and what is left afterwards."""

from __future__ import annotations

import copy
import ctypes
import gc
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from threading import Event, Thread, local
from typing import Any

import pytest

import recompute as rc

torch = pytest.importorskip("torch", reason="the extra 'torch' is not installed")
sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

from _torch_scripts import alike, left_in, network, train  # noqa: E402  # after importorskip
from example_scripts import example  # noqa: E402  # it lies beside other tests
from torch.utils._python_dispatch import is_in_torch_dispatch_mode  # noqa: E402  # after importorskip

import recompute_torch as rt  # noqa: E402  # after importorskip
from recompute import extend  # noqa: E402  # after importorskip
from recompute.simulator import baseline, simulate  # noqa: E402  # after importorskip
from recompute.traces import read  # noqa: E402  # after importorskip
from recompute_torch._native import load  # noqa: E402  # after importorskip

pytestmark = pytest.mark.usefixtures("path")

TASKS = example("_torch_training").TASKS

TIGHT = {"treelstm": 0.45, "transformer": 0.4}
"""Instead of 0.35: with less, a few tensors that are needed at once do not fit, or almost."""

TIGHT_WITH_SCRATCH = {"resnet": 0.5, "unet": 0.5, "lstm": 0.5}
"""On the native path, which also counts what kernels take while they run."""


def trained(name: str, budget: int | None, plainly: bool = False) -> tuple[dict[str, Any], rc.Stats | None]:
    """Losses and everything else that is left of a few steps."""
    torch.manual_seed(0)
    task = TASKS[name]()
    stats = None
    if plainly:
        losses = [task.step() for _ in range(3)]
    else:
        with rt.budget(budget) as block:
            losses = [task.step() for _ in range(3)]
            stats = block.stats()
    return {f"loss {number}": loss for number, loss in enumerate(losses)} | task.state(), stats


@cache
def unlimited(name: str, path: str) -> tuple[dict[str, Any], dict[str, Any], rc.Stats]:
    """In plain torch, and in a block without a limit on the path that is set."""
    found, stats = trained(name, None)
    assert stats is not None
    assert stats.path == path  # type: ignore[attr-defined]  # those of a block have it
    return trained(name, None, plainly=True)[0], found, stats


@pytest.mark.usefixtures("path")
def test_with_a_default_device() -> None:
    """Inside of a mode, such as a default device, steps and reports are those outside of it."""

    def steps() -> list[Any]:
        torch.manual_seed(0)
        kinds = (partial(torch.nn.Linear, 64, 64), torch.nn.ReLU, torch.nn.Dropout)
        module = torch.nn.Sequential(*[kind() for _ in range(6) for kind in kinds])
        optimizer = torch.optim.AdamW(module.parameters())
        kept.append(optimizer)
        losses = []
        for _ in range(3):
            x = torch.randn(2048, 64)
            optimizer.zero_grad()
            loss = (module(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return [*losses, *torch.nested.nested_tensor([x[:2], x[:3]]).unbind()]

    kept: list[Any] = []
    expected = steps()
    with torch.device("cpu"), rt.budget("4MB") as block:
        found = steps()
        report = block.report()
        assert block.stats().rematerializations > 0
        assert report.held["optimizer"].here > 0
    assert alike(expected, found) == []


@pytest.mark.parametrize("name", TASKS)
def test_a_block_changes_nothing(name: str, path: str) -> None:
    """Losses, gradients, parameters, buffers and the optimizer's memory are those of plain torch, to the last bit."""
    plain, found, stats = unlimited(name, path)
    assert list(plain) == list(found)
    assert [list(plain)[at] for at in alike(list(plain.values()), list(found.values()))] == []
    assert stats.rematerializations == 0


@pytest.mark.parametrize("share", [0.6, 0.35])
@pytest.mark.parametrize("name", TASKS)
def test_a_budget_changes_nothing(name: str, share: float, path: str) -> None:
    """The same within a share of the memory; only the first output of each size may exceed it, by what is said."""
    plain, _, free = unlimited(name, path)
    tight = TIGHT | TIGHT_WITH_SCRATCH if path == "native" else TIGHT
    budget = int(free.peak * (tight.get(name, share) if share < 0.5 else share))
    found, stats = trained(name, budget)
    assert [list(plain)[at] for at in alike(list(plain.values()), list(found.values()))] == []
    assert stats is not None
    assert stats.rematerializations > 0
    assert stats.peak <= budget + stats.overshoot
    assert stats.operations == free.operations


METHODS = {name: getattr(torch.Tensor, name) for name in ("numpy", "tolist", "__dlpack__", "data_ptr", "__repr__")}
"""Some that a block replaces while it is open."""

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, 1e-3, momentum=0.9),
    "foreach": lambda parameters: torch.optim.Adam(parameters, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
}


@pytest.mark.usefixtures("path")
def test_a_perceptron_in_half_of_its_memory() -> None:
    """Fewer operators run again than there are, though every gradient is made from the one that goes after it."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(*[layer for _ in range(8) for layer in (torch.nn.Linear(128, 128), torch.nn.ReLU())])
    optimizer, x = torch.optim.Adam(module.parameters(), 1e-3), torch.randn(1024, 128)

    def step() -> None:
        optimizer.zero_grad()
        (module(x) - x).square().mean().backward()
        optimizer.step()

    with rt.budget() as block:
        step(), step()
        peak = block.stats().peak
    with rt.budget(peak // 2) as block:
        for _ in range(4):
            step()
        stats = block.stats()
    assert 0 < stats.rematerializations < stats.operations


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_memory_is_flat(name: str) -> None:
    """After 2,000 steps as many bytes, calls and objects are there as after 100, and nobody called anything."""
    module = torch.nn.Sequential(torch.nn.Linear(8, 2), torch.nn.ReLU(inplace=True), torch.nn.Dropout(0.1))
    optimizer = OPTIMIZERS[name](module.parameters())
    with rt.budget() as block:
        train(module, optimizer, 100)
        before = held(block)
        train(module, optimizer, 1900)
        assert held(block) == before


def test_a_moving_average_is_flat() -> None:
    """What outlives each step, such as mean weights and a running loss, keeps none of the steps."""
    module, mean = network(depth=1), network(depth=1)
    optimizer = OPTIMIZERS["momentum"](module.parameters())
    with rt.budget() as block:
        loss = torch.zeros(())
        seen = []
        for _ in range(6):
            for step_loss in train(module, optimizer, 10):
                loss = loss * 0.99 + step_loss * 0.01
                with torch.no_grad():
                    for slow, fast in zip(mean.parameters(), module.parameters(), strict=True):
                        slow.lerp_(fast, 0.01)
            seen.append(held(block))
        assert seen[-1] == seen[1]


def held(block: rt.budget) -> dict[str, int]:
    """Bytes and remembered calls of a block, and how many of the objects behind them there are in all."""
    gc.collect()
    if block.stats().path == "native":
        now = load.figures(load.library())
        return {"bytes": now.used, "calls": now.calls, "values": now.values}
    kinds = [type(thing) for thing in gc.get_objects()]
    return {
        "bytes": block.stats().used,
        "calls": block.cache.extend.history,
        "storages": len(block._tracker.known()),
        "nodes": kinds.count(extend.Value),
    }


def of_thread(module: Any) -> list[Any]:
    """A training that draws from a generator of its own, since threads share torch's."""
    generator = torch.Generator().manual_seed(7)
    optimizer = torch.optim.Adam(module.parameters(), 1e-2)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = module(torch.randn(256, 8, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses + left_in(module)


def test_training_follows_a_plan(path: str) -> None:
    """Steps of the optimizer mark rounds; once a plan is followed, parameters are still as without a block."""

    if path == "native":
        pytest.skip("the native path makes no plans")

    def left_after(steps: int, budget: int | None) -> tuple[list[torch.Tensor], int]:
        """The parameters, and the steps that were made: fewer if two began to follow a plan."""
        torch.manual_seed(0)
        module = torch.nn.Sequential(*[layer for _ in range(8) for layer in (torch.nn.Linear(16, 16), torch.nn.Tanh())])
        optimizer = torch.optim.SGD(module.parameters(), 1e-3)
        x = torch.randn(64, 16)
        made = followed = 0
        with rt.budget(budget) as block:
            while made < steps and followed < 2:
                followed += block.stats().foresight.startswith("following")
                optimizer.zero_grad()
                module(x).square().sum().backward()
                optimizer.step()
                made += 1
        return [parameter.detach().clone() for parameter in module.parameters()], made

    found, steps = left_after(3000, 44_000)
    assert steps < 3000
    expected, _ = left_after(steps, None)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_threads_of_the_library_take_no_part() -> None:
    """A thread that plans beside the program has no mode, and does not keep a block alive that is over."""
    modes: list[int] = []
    with rt.budget() as block:
        thread = extend.BackgroundThread("test", lambda: modes.append(torch._C._len_torch_dispatch_stack()))
        thread.start()
        thread.join()
    assert modes == [0]
    gone = weakref.ref(block)
    del block
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("entered", ["by the thread that starts them", "by each"])
@pytest.mark.parametrize("share", [None, 0.8])
def test_threads(entered: str, share: float | None) -> None:
    """Two models in two threads train within one budget, as each would alone."""
    expected = of_thread(network(0.0))
    with rt.budget() as block:
        alone = [of_thread(network(0.0))]
        peak = block.stats().peak
    block = rt.budget(None if share is None else int(2 * share * peak))
    modules = [network(0.0), network(0.0)]
    found: list[Any] = [None, None]

    def work(number: int) -> None:
        if entered == "by each":
            with block:
                found[number] = of_thread(modules[number])
        else:
            found[number] = of_thread(modules[number])

    threads = [Thread(target=work, args=(number,)) for number in range(2)]
    if entered == "by each":
        with block:  # it is left when the last one leaves
            run_all(threads)
    else:
        with block:
            run_all(threads)
    assert [alike(expected, result) for result in (*alone, *found)] == [[], [], []]


@pytest.mark.parametrize("budget", [17_000_000, 12_500_000])
def test_threads_share_a_budget_that_is_too_small_for_all_at_once(budget: int) -> None:
    """A thread that finds no room while others hold their arguments goes on when these have what they need."""
    size, failed = 1 << 19, []

    def work() -> None:
        try:
            for number in range(100):
                x = torch.full((size,), float(number))
                y = x * 2
                assert torch.sin(y + x)[-1] == torch.sin(torch.tensor(3.0 * number))
        except BaseException as error:
            failed.append(error)

    with rt.budget(budget) as block:
        run_all([Thread(target=work) for _ in range(4)])
    assert failed == []
    assert block.stats().overshoot == 0
    assert block.stats().evictions > 100


def test_a_thread_takes_part_no_longer_as_it_ends() -> None:
    """Its mode goes before the thread does: what ends after the interpreter cannot give a mode back."""
    left: list[tuple[int, bool]] = []

    class Last:
        def __del__(self) -> None:
            left.append((torch._C._len_torch_dispatch_stack(), block._is_here()))

    def work() -> None:
        here.last = Last()
        assert block._is_here()

    here = local()
    with rt.budget() as block:
        run_all([Thread(target=work)])
    assert left == [(0, False)]


def test_blocks_of_two_threads_that_overlap_leave_nothing_in_torch() -> None:
    """What torch notes of modes for the whole process, such as torch.compile asks for, is as it was before them."""
    first_is_in, first_may_leave = Event(), Event()

    def work() -> None:
        with rt.budget(native=False):
            first_is_in.set()
            first_may_leave.wait(60)

    before = is_in_torch_dispatch_mode()
    thread = Thread(target=work)
    thread.start()
    assert first_is_in.wait(60)
    with rt.budget(native=False):
        first_may_leave.set()
        thread.join()
        assert is_in_torch_dispatch_mode()
    assert is_in_torch_dispatch_mode() == before


def run_all(threads: list[Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_afterwards() -> None:
    """What is alive after a block are ordinary tensors, which train on as if there had been none."""
    tasks = []
    for plainly in (True, False):
        torch.manual_seed(0)
        tasks.append(TASKS["resnet"]())
        if plainly:
            kept = tasks[-1].step(), tasks[-1].step()
        else:
            with rt.budget() as block:
                kept = tasks[-1].step(), tasks[-1].step()
                block.cache.release_memory()
        for tensor in (*tasks[-1].state().values(), *kept):
            assert type(tensor) in (torch.Tensor, torch.nn.Parameter)
            assert not vars(tensor.untyped_storage())
            assert tensor.untyped_storage().nbytes() >= tensor.nbytes
            assert tensor.untyped_storage().resizable()
        tasks[-1].step()
    assert alike(*[list(task.state().values()) for task in tasks]) == []
    assert [name for name in METHODS if getattr(torch.Tensor, name) is not METHODS[name]] == []


def test_a_graph_outlives_the_block() -> None:
    """The forward pass inside of a block, the backward pass after it, and the other way round."""
    results = []
    for inside in (None, "forward", "backward"):
        module = network(0.0)
        torch.manual_seed(2)
        x = torch.randn(4, 8)
        if inside == "forward":
            with rt.budget() as block:
                loss = module(x).square().sum()
                block.cache.release_memory()
            loss.backward()
        else:
            loss = module(x).square().sum()
            if inside == "backward":
                with rt.budget() as block:
                    loss.backward()
                    block.cache.release_memory()
            else:
                loss.backward()
        results.append(left_in(module))
    assert alike(results[0], results[1]) == []
    assert alike(results[0], results[2]) == []


def test_only_what_is_checkpointed() -> None:
    """With `only_checkpointed` the block sees what is made from tensors that were named, and nothing else."""
    x = torch.randn(64)
    with rt.budget(only_checkpointed=True) as block:
        other = (x * 2).exp()
        assert block.stats().operations == 0
        y = rt.checkpoint(x.clone())
        z = (y * 2).exp()
        assert block.stats().operations == 2
        assert block.cache.release_memory() >= z.nbytes
        assert torch.equal(other, z)
        assert block.stats().rematerializations == 2


@pytest.mark.parametrize("tiers", [(), (rc.Host("20kB"),)], ids=["alone", "with a tier"])
def test_verified(tiers: tuple[rc.Host, ...], path: str) -> None:
    """With `verify` too, optimizers may write to parameters, and batch norm to its statistics."""
    if path == "native":
        pytest.skip("it refuses verify")
    results = []
    for block in (nullcontext(), rt.budget("60kB", verify=True, tiers=tiers)):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16), torch.nn.Tanh(), torch.nn.Dropout(0.1)]
        module = torch.nn.Sequential(*layers, *copy.deepcopy(layers), *copy.deepcopy(layers))
        optimizer = torch.optim.Adam(module.parameters())
        with block:
            for _ in range(3):
                optimizer.zero_grad()
                module(torch.randn(128, 16)).square().mean().backward()
                optimizer.step()
        results.append(left_in(module))
    assert alike(*results) == []
    assert block.stats().rematerializations > 0


def test_verify_finds_what_was_written_unseen(path: str) -> None:
    """A source that changed without an operator."""
    if path == "native":
        pytest.skip("it refuses verify")
    x = torch.ones(64)
    address = x.data_ptr()
    before = ctypes.string_at(address, 4)
    with rt.budget(verify=True) as block:
        y = x * 2
        block.cache.release_memory()
        ctypes.memset(address, 0, 4)
        with pytest.raises(rc.ImpureError, match="changed in place"):
            y.add(1)
        ctypes.memmove(address, before, 4)


@pytest.mark.parametrize("only_checkpointed", [True, False])
def test_an_error_names_the_line(only_checkpointed: bool, path: str) -> None:
    """That of the program, which called the operator."""
    x = torch.ones(128)
    with rt.budget("1kB", only_checkpointed=only_checkpointed):
        rt.checkpoint(x)
        with pytest.raises(rc.BudgetError, match=r"aten\.mul.*test_torch_training\.py:") as raised:
            x * 2
    assert (type(raised.value), raised.value.device) == (rc.BudgetError, "cpu")
    assert raised.value.needed > 1_000


def test_a_budget_by_device_is_of_a_device_that_torch_knows(path: str) -> None:
    """Any name of torch's for a device is that device; another one is an error, not a budget for nothing."""
    if path == "native":
        pytest.skip("it has one device")
    with rt.budget({"cpu:0": 1_000}), pytest.raises(rc.BudgetError):
        torch.ones(2_000).exp()
    with pytest.raises(ValueError, match="'cudda:0' in the budget is no device of torch"):
        rt.budget({"cudda:0": "1GB"})
    with pytest.raises(ValueError, match="names cuda:0 twice"):
        rt.budget({"cuda:0": "1GB", "cuda": "2GB"})


def test_decheckpoint() -> None:
    """A tensor that was taken out of the budget has its content, stays, and has forgotten how it was made."""
    with rt.budget() as block:
        y = torch.ones(64) * 2
        block.cache.release_memory()
        assert rt.decheckpoint(y) is y
        block.cache.release_memory()
        assert block.stats().rematerializations == 2
        assert not hasattr(y.untyped_storage(), "_recompute")
        assert y.sum().item() == 128


@pytest.mark.parametrize("call", [rt.checkpoint, rt.decheckpoint])
def test_outside_of_a_block(call: Callable[[Any], Any]) -> None:
    """The two need a block, and say so."""
    with pytest.raises(RuntimeError, match=r"with rt\.budget"):
        call(torch.ones(2))


def test_a_recorded_step_replays(tmp_path: Path) -> None:
    """The trace of a training step is a program for the simulator, which finds its peak and what half of it costs."""
    path = tmp_path / "step.jsonl"
    torch.manual_seed(0)
    task = TASKS["resnet"]()
    with rt.budget(None, trace=path) as block:
        task.step()
        peak = block.stats().peak
    program = read(path)
    assert any("convolution" in call.name for call in program.calls)
    assert sum(baseline(program).values()) == peak
    run = simulate(program, of_peak=0.5)
    assert (run.status, run.rematerializations > 0) == ("ok", True)
