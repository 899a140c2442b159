"""What counts within the budget of a block: all memory that is there, nothing else, and nothing beyond it unsaid."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the extra 'torch' is not installed")

from torch import distributed, nn  # noqa: E402  # after importorskip
from torch.autograd import forward_ad  # noqa: E402  # the same
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402  # the same

import recompute as rc  # noqa: E402  # the same
import recompute_torch as rt  # noqa: E402  # the same
from recompute import extend  # noqa: E402  # the same
from recompute_torch._escapes import handle_of  # noqa: E402  # the same
from recompute_torch._memory import Kept, Memory  # noqa: E402  # the same
from recompute_torch._rules import rule_of  # noqa: E402  # the same

pytestmark = pytest.mark.usefixtures("one_thread")


def layers(x: Any) -> Any:
    """As many matrices as x, and some more, one after the other."""
    for _ in range(12):
        x = (x @ x * 0.01).tanh() + x
    return x


def forward_mode() -> Any:
    """Derivatives of all steps along a direction, each kept until the end."""
    dual, kept = None, []
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.randn(40, 40), torch.randn(40, 40))
        for _ in range(12):
            dual = (dual * 1.01).sin() + dual
            kept.append(dual)
        return sum(forward_ad.unpack_dual(value).tangent.sum() for value in kept)


def jvp() -> Any:
    """torch.func.jvp."""
    made, slope = torch.func.jvp(layers, (torch.randn(40, 40),), (torch.randn(40, 40),))
    return made.sum() + slope.sum()


def hessian() -> Any:
    """torch.func.hessian: forward over reverse."""
    weights = torch.randn(20, 20) * 0.1

    def loss(x: Any) -> Any:
        for _ in range(6):
            x = (weights @ x).tanh() + x
        return x.pow(3).sum()

    return torch.func.hessian(loss)(torch.randn(20)).sum()


def graph() -> Any:
    """A graph that make_fx has made, with the tensors that have no content which it notes down."""
    x = torch.randn(40, 40)
    return make_fx(layers)(x)(x).sum()


def reverse_over_forward() -> Any:
    """torch.func.grad of a derivative along a direction."""
    x, direction = torch.randn(30, 30), torch.randn(30, 30)
    return torch.func.grad(lambda x: torch.func.jvp(layers, (x,), (direction,))[1].sum())(x).sum()


PROGRAMS: dict[Callable[[], Any], tuple[float, ...]] = {
    forward_mode: (0.9, 0.5, 0.3),
    jvp: (0.9, 0.6),
    hessian: (0.9, 0.6),
    graph: (0.9, 0.8),
    reverse_over_forward: (0.9, 0.6),
}
"""And shares of the memory in which they can do."""

NATIVE_SHARES: dict[Callable[[], Any], tuple[float, ...]] = {forward_mode: (0.9, 0.5)}
"""Where what kernels take for a moment is counted, too."""


def value_of(tensor: Any) -> Any:
    """What the cache knows of a tensor."""
    return handle_of(tensor)


def within(block: rt.budget, budget: int) -> bool:
    """Whether what was counted was memory of the machine, within the budget and what is said of it."""
    stats = block.stats()
    assert [pool.device for pool in stats.pools] == ["cpu"]
    return stats.peak <= budget + stats.overshoot


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # in torch's own forward-mode rules
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_derivatives_forwards(program: Callable[[], Any], path: str) -> None:
    """Forward-mode derivatives and graphs: results are the same, and the peak is that of real memory, in any budget."""
    torch.manual_seed(0)
    expected = program()
    with rt.budget() as block:
        torch.manual_seed(0)
        assert torch.equal(program(), expected)
        whole = block.stats().peak
    shares = NATIVE_SHARES.get(program, PROGRAMS[program]) if path == "native" else PROGRAMS[program]
    for share in shares:
        budget = int(share * whole)
        with rt.budget(budget) as block:
            torch.manual_seed(0)
            assert torch.equal(program(), expected)
            assert within(block, budget)
            assert block.stats().overshoot == 0
            assert block.stats().evictions > 0
        assert within(block, budget)


def test_arguments_that_fit_one_after_the_other(path: str) -> None:
    """An argument that is there makes way for what another one is made of, and comes back after it."""
    size = 40 * 40 * 4
    with rt.budget() as block:
        start = torch.ones(40, 40)
        one, two = start + 1, (start * 2) @ (start * 3)
        block.budget = 1  # nothing stays
        block.budget = 7 * size // 2  # two is made of two others: no room for one beside these
        assert one.sum() == 2 * 40 * 40
        assert torch.equal(one + two, torch.full((40, 40), 6.0 * 40 + 2))
        assert block.stats().overshoot == 0


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of this process alone."""
    if not (distributed.is_available() and distributed.is_gloo_available()):
        pytest.skip("torch was built without gloo")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def sharded(steps: int) -> Any:
    """The loss after some steps of a model whose parameters are gathered and freed layer by layer (FSDP2)."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(4)])
    for layer in module:
        fully_shard(layer)
    fully_shard(module)
    optimizer = torch.optim.AdamW(module.parameters())
    for _ in range(steps):
        x = torch.randn(128, 32)
        loss = (module(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.detach()


@pytest.mark.filterwarnings("ignore")  # torch's own
def test_sharded_parameters(group: None, path: str) -> None:
    """FSDP2: the same steps within the budget, in the block, when it ends, and when there is not enough of it."""
    expected = sharded(3)
    with rt.budget() as block:
        assert torch.equal(sharded(3), expected)
        whole = block.stats().peak
    for share in (0.9, 0.8, 0.5):
        budget = int(share * whole)
        block = rt.budget(budget)
        try:
            with block:
                assert torch.equal(sharded(3), expected)
                assert within(block, budget)
        except rc.BudgetError:
            assert share == 0.5
        assert within(block, budget)


def test_the_end_of_a_block_is_within_the_budget() -> None:
    """What is alive comes back one by one, so that what it is made of need not all be there at once."""
    with rt.budget(10_000, native=False) as block:
        x = torch.ones(500)
        kept = []
        for number in range(80):
            x = x * 1.01 + number
            if number % 10 == 9:
                kept.append(x)
        assert sum(not value_of(tensor).resident for tensor in kept) > 3
    stats = block.stats()
    assert (stats.peak, stats.overshoot, stats.used) == (10_000, 0, 0)
    assert [float(tensor[0]) for tensor in kept] == sorted(float(tensor[0]) for tensor in kept)


def test_what_must_come_back_without_room_for_it() -> None:
    """A tensor that cannot be made within the budget comes back all the same when the block ends, and that is said."""
    with rt.budget(16_000, native=False) as block:
        x = torch.arange(1_000.0)
        made = torch.add(x + 1, x + 2)
        block.cache.release_memory()
        block.budget = 9_000
        with pytest.raises(rc.BudgetError):
            print(made)
    stats = block.stats()
    assert (stats.peak, stats.overshoot) == (16_000, 16_000 - 9_000)
    assert torch.equal(made, 2 * x + 3)


def test_fakes_are_nobodys_memory() -> None:
    """Tensors without content, made while torch fakes it or on its device "meta", take nothing and evict nothing."""
    from torch._subclasses import FakeTensorMode

    with rt.budget(20_000, native=False) as block:
        kept = torch.ones(2_000) * 2
        with FakeTensorMode():
            fakes = [torch.randn(10**6), torch.empty(10**6), torch.ones(10**6) * 2]
        shapes = [torch.empty(10**6, device="meta") * 2, torch.randn(10**6, device="meta"), kept.to("meta")]
        assert [len(shape) for shape in (*fakes, *shapes)] == [*[10**6] * 5, 2_000]
        stats = block.stats()
        assert (stats.peak, stats.evictions, [pool.device for pool in stats.pools]) == (16_000, 0, ["cpu"])
        assert value_of(kept)._node.operation is not None  # looking at its shape changed nothing


def test_what_cannot_be_made_again_counts_at_once() -> None:
    """A tensor made from a sparse one is counted when it is made, not when it is used first."""
    with rt.budget(native=False) as block:
        sparse = torch.eye(50).to_sparse()
        gc.collect()
        before = block.stats().used
        dense = sparse.to_dense()
        assert block.stats().used == before + dense.nbytes
        del dense
        assert block.stats().used == before


def test_memory_that_another_stream_uses_belongs_to_its_storage() -> None:
    """The allocator is told of it, and knows the owner: not the cache, which has it since memory was short."""
    assert rule_of(torch.ops.aten.record_stream.default).what == "other"
    with rt.budget(native=False) as block:
        x = torch.ones(1000)
        y = x * 2
        block.cache.release_memory()
        z = y * 3
        node = extend.node_of(handle_of(z))
        assert type(node.payload) is Kept
        block._tracker.give_back([node])
        assert type(node.payload) is Memory
        block.cache.release_memory()
        assert node.payload is extend.EVICTED
        assert z.tolist() == [6.0] * 1000
