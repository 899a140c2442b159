"""Operators in Python that read their arguments past torch: they do not wait for the cache, and change no result."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from threading import Thread
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the extra 'torch' is not installed")
np = pytest.importorskip("numpy", reason="the extra 'numpy' is not installed")

from _torch_operators import Evicting  # noqa: E402  # after importorskip
from _torch_scripts import alike  # noqa: E402  # after importorskip

import recompute_torch as rt  # noqa: E402  # after importorskip

pytestmark = pytest.mark.usefixtures("path")

SIZE = 64  # elements of 4 bytes
SHARE = 0.85
"""The small budget, as a part of what each script has in memory without one."""

kept: list[Any] = []
"""What operators have kept of their arguments."""


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    yield
    kept.clear()


def doubled(x: torch.Tensor, read: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    """Twice what was read, as NumPy reckons."""
    return torch.from_numpy(np.asarray(read(x), dtype=np.float32) * np.float32(2))


def from_address(x: torch.Tensor) -> Any:
    """What lies where a tensor says that its memory is."""
    return np.ctypeslib.as_array(ctypes.cast(x.data_ptr(), ctypes.POINTER(ctypes.c_float)), (x.numel(),)).copy()


def keeping(x: torch.Tensor) -> Any:
    """An array that stays when the operator is over."""
    kept.append(x.numpy())
    return kept[-1]


def keeping_the_storage(x: torch.Tensor) -> Any:
    """The same of a storage."""
    kept.append(x.untyped_storage())
    return x.numpy()


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "numpy": lambda x: x.numpy(),
    "tolist": lambda x: x.tolist(),
    "item": lambda x: [part.item() for part in x],
    "address": from_address,
    "dlpack": lambda x: np.from_dlpack(x.detach()),
    "kept": keeping,
    "storage": keeping_the_storage,
}


def make_operator(name: str, read: Callable[[torch.Tensor], Any], fake: bool) -> Any:
    """`double` as a custom operator; with a fake the block knows the size before it runs."""

    @torch.library.custom_op(f"recompute_tests::double_{name}_{'fake' if fake else 'real'}", mutates_args=())
    def operator(x: torch.Tensor) -> torch.Tensor:
        return doubled(x, read)

    if fake:
        operator.register_fake(lambda x: torch.empty_like(x))
    operator.register_autograd(lambda context, slope: slope * 2)
    return operator


OPERATORS = {(name, fake): make_operator(name, read, fake) for name, read in READS.items() for fake in (True, False)}


@torch.library.custom_op("recompute_tests::add_into", mutates_args={"target"})
def add_into(target: torch.Tensor, x: torch.Tensor) -> None:
    """It writes to an argument, and says so."""
    target.numpy()[...] += x.numpy()


@torch.library.custom_op("recompute_tests::add_into_and_count", mutates_args={"target"})
def add_into_and_count(target: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """It writes to an argument, and makes something as well."""
    target.numpy()[...] += x.numpy()
    return torch.from_numpy(np.cumsum(target.numpy(), dtype=np.float32))


@torch.library.custom_op("recompute_tests::add_by_operators", mutates_args={"target"})
def add_by_operators(target: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """It writes to an argument by operators of torch."""
    torch.add(target, x, out=target)
    target[:3].mul_(2)
    return target.cumsum(0)


@torch.library.custom_op("recompute_tests::normalize", mutates_args={"target"})
def normalize(target: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """It writes to an argument what batch norm hides, and may give it other memory."""
    rows = x.expand(2, -1)
    torch.nn.functional.batch_norm(rows, target, torch.ones(SIZE), training=True)
    return target.resize_(SIZE) * 2


@torch.library.custom_op("recompute_tests::split", mutates_args=())
def split(x: torch.Tensor) -> list[torch.Tensor]:
    """It makes several."""
    return [torch.from_numpy(part.copy()) for part in np.split(x.numpy(), 4)]


@torch.library.custom_op("recompute_tests::let_go", mutates_args=())
def let_go(x: torch.Tensor) -> torch.Tensor:
    """It lets go of what was kept, which it should not."""
    kept.clear()
    return x.clone()


class Sine(torch.autograd.Function):
    """A function of its own, with NumPy both ways."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(np.sin(x.detach().numpy()))

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return slope * torch.from_numpy(np.cos(x.detach().numpy()))


def reading(operator: Any) -> Sequence[Any]:
    """What is read changes afterwards, which must not change what was made of it."""
    x = torch.linspace(0, 1, SIZE, requires_grad=True)
    found = []
    for number in range(3):
        y = x * (number + 1)
        found += [operator(y), (operator(y.detach()) + y).exp()]
        with torch.no_grad():
            y.add_(1)
        found += [operator(y.detach()), y.detach() * 1]
    total = torch.zeros(())
    for part in found:
        total = total + part.sin().sum()
    total.backward()
    return [*found, x.grad]


def writing(operator: Any) -> Sequence[Any]:
    """Tensors that an operator made and tensors from outside are written, between looks at them."""
    outside = torch.ones(SIZE)
    found = []
    for target in (outside * 3, outside, torch.zeros(SIZE)):
        for number in range(3):
            before = target * 2
            found += [operator(target, before + number), before, target.sin()]
        found += [target * 1]
    alone = torch.zeros(SIZE) * 2  # nothing else is made of it
    found += [operator(alone, alone + number) for number in range(3)]
    return [value for value in [*found, alone] if value is not None]


def in_parts() -> Sequence[Any]:
    """Several outputs, one of which is written."""
    parts = split(torch.linspace(0, 1, SIZE) * 3)
    parts[1].mul_(2)
    return [*split(torch.cat(parts) + 1), *parts]


def functions_of_their_own() -> Sequence[Any]:
    """autograd.Function, one after the other."""
    x = torch.linspace(0, 1, SIZE, requires_grad=True)
    y = x * 1
    for _ in range(6):
        y = Sine.apply(y) * 2
    y.sum().backward()
    return [y, x.grad]


def check(script: Callable[[], Sequence[Any]], least: int = 1) -> None:
    """The same to the last bit without a limit, in a small budget, and with everything evicted all the time."""
    expected = list(script())
    with rt.budget() as block:
        found = script()
        peak = block.stats().peak
    assert alike(expected, found) == []
    kept.clear()
    budget = int(SHARE * peak)
    with rt.budget(budget) as block:
        found = script()
        stats = block.stats()
    assert alike(expected, found) == []
    assert stats.evictions
    assert stats.peak <= budget + stats.overshoot
    kept.clear()
    with rt.budget() as block, Evicting(block):
        found = script()
        stats = block.stats()
    assert alike(expected, found) == []
    assert stats.rematerializations >= least


@pytest.mark.parametrize("fake", [True, False])
@pytest.mark.parametrize("name", READS)
def test_an_operator_that_reads_past_torch(name: str, fake: bool) -> None:
    """By each way to read a tensor's memory, known size or not."""
    check(lambda: reading(OPERATORS[name, fake]))


@pytest.mark.parametrize(
    "operator",
    [add_into, add_into_and_count, add_by_operators, normalize],
    ids=["writes", "writes and makes", "writes by operators", "writes statistics"],
)
def test_an_operator_that_writes(operator: Any) -> None:
    """It writes what its schema says that it writes, by an array or by operators of torch."""
    check(lambda: writing(operator))


def test_operators_in_threads() -> None:
    """Two threads at once, within one budget."""
    script = partial(reading, OPERATORS["numpy", True])
    expected = list(script())
    with rt.budget() as block:
        script()
        peak = block.stats().peak
    found: list[Any] = [None, None]

    def work(number: int) -> None:
        found[number] = script()

    with rt.budget(2 * peak) as block:
        threads = [Thread(target=work, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [alike(expected, result) for result in found] == [[], []]


def test_several_outputs() -> None:
    """A list of tensors, made by NumPy."""
    check(in_parts)


def test_functions_of_their_own() -> None:
    """What is no operator takes part as ever."""
    check(functions_of_their_own)


def test_what_was_only_looked_at_is_evicted() -> None:
    """An array that is gone when the operator is over keeps nothing in memory."""
    with rt.budget() as block:
        x = torch.ones(SIZE) * 2
        y = OPERATORS["numpy", True](x)
        assert block.cache.release_memory() >= x.nbytes + y.nbytes
        assert y.sum().item() == 4 * SIZE


def test_a_tensor_that_goes_while_it_is_needed() -> None:
    """Its last reference goes after the cache has found it in memory, and before it is read: it is made again."""
    with rt.budget() as block:
        x = torch.ones(SIZE) * 2
        y = let_go(x)
        kept.append(x * 3)
        z = kept[0] + y
        block.cache.release_memory()
        assert kept[0].sum().item() == 6 * SIZE
        assert z.sum().item() == 8 * SIZE
        assert not kept


@pytest.mark.parametrize("name", ["kept", "storage"])
def test_what_was_kept_stays(name: str) -> None:
    """An array or a storage that an operator keeps has its content as long as it lives."""
    with rt.budget() as block:
        x = torch.ones(SIZE) * 2
        y = OPERATORS[name, False](x)
        block.cache.release_memory()
        (left,) = kept
        assert (left if name == "kept" else np.frombuffer(bytes(left.tolist()), np.float32)).tolist() == [2] * SIZE
        with torch.no_grad():
            x.add_(1)
        block.cache.release_memory()
        assert y.sum().item() == 4 * SIZE


def test_what_draws_from_a_tensor_that_it_writes_runs_once() -> None:
    """As cuDNN's recurrent layers do with dropout, whose state their schemas do not call written."""
    with torch.library._scoped_library("recompute_tests", "FRAGMENT") as library:
        library.define("layer(Tensor x, Tensor? dropout_state) -> Tensor")

        def layer(x: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
            return x + 1 if state is None else x + state.add_(1)

        library.impl("layer", layer, "CPU")
        run = torch.ops.recompute_tests.layer

        def chain(state: torch.Tensor | None) -> list[torch.Tensor]:
            made = [torch.zeros(1000)]
            for _ in range(20):
                made.append(run(made[-1], state).exp().log())
            return made

        for state in (None, torch.zeros(1000)):
            expected = chain(None if state is None else state.clone())
            with rt.budget("40kB" if state is None else "200kB", native=False) as block:
                found = chain(state)
                assert block.cache.release_memory() > 0
            assert block.stats().rematerializations > 0
            assert alike(expected, found) == []
