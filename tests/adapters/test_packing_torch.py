"""Tensors as bytes and back, and blocks whose evicted tensors move: all is as in plain torch, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import recompute as rc
from recompute.testing import check_adapter
from recompute.testing.conformance import registered

torch = pytest.importorskip("torch", reason="the extra 'torch' is not installed")

from _torch_programs import INSTRUCTIONS, Instruction, check_peak, look, run, shared  # noqa: E402  # after importorskip
from _torch_scripts import alike, left_in, network, train  # noqa: E402  # they lie beside other tests
from packed import fetched, packed, unpacked  # noqa: E402

import recompute_torch as rt  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = ["float32", "float64", "bfloat16", "complex64", "int64", "uint8", "bool", "float8_e4m3fn"]
NUMBERS = st.integers(0, 12)
NAMES = st.one_of(st.sampled_from(sorted(INSTRUCTIONS)), st.sampled_from(["evict", "delete", "requires_grad"]))
PROGRAMS: st.SearchStrategy[list[Instruction]] = st.lists(st.tuples(NAMES, NUMBERS, NUMBERS, NUMBERS), max_size=40)


@pytest.fixture(scope="module", autouse=True)
def _serving() -> Any:
    """The adapter serves tensors, whether or not the package is installed."""
    with registered(rt.adapter, torch.Tensor, torch.UntypedStorage):
        yield


@st.composite
def recipes(draw: st.DrawFn) -> Callable[[], Any]:
    """Makes the same tensor each time: of random bits, in any order, a view of a part, conjugated, negated, a leaf."""
    dtype = getattr(torch, draw(st.sampled_from(DTYPES)))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    order = draw(st.permutations(range(len(shape))))
    seed, step, start = draw(st.integers(0, 999)), draw(st.integers(1, 3)), draw(st.integers(0, 1))
    expanded, conjugated, negated, leaf, inference = (draw(st.booleans()) for _ in range(5))

    def make() -> Any:
        with torch.inference_mode(inference):
            generator = torch.Generator().manual_seed(seed)
            bits = torch.randint(0, 2, [*shape, dtype.itemsize], dtype=torch.uint8, generator=generator)
            tensor = bits.view(dtype)[..., 0].permute(order)
            if shape:
                tensor = tensor[start::step]
            if expanded:
                tensor = tensor[None].expand(3, *tensor.shape)
            if conjugated and dtype.is_complex:
                tensor = tensor.conj()
            if negated and dtype.is_complex:
                tensor = tensor.conj().imag
            return tensor.requires_grad_(leaf and (tensor.is_floating_point() or tensor.is_complex()) and not inference)

    return make


def looks(tensor: Any) -> tuple[Any, ...]:
    """All there is to know of a tensor."""
    return (
        *(type(tensor), tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device),
        *(tensor.is_conj(), tensor.is_neg(), tensor.requires_grad, tensor.is_leaf, tensor.is_inference()),
        tensor.untyped_storage().tolist(),
    )


@given(recipes())
def test_a_tensor_comes_back_to_the_last_bit(make: Callable[[], Any]) -> None:
    """Its whole storage, its strides and what else it is; by itself, inside of something, and from a disk."""
    tensor = make()
    assert looks(unpacked(tensor)) == looks(tensor)
    back = unpacked([tensor, {"key": tensor}])
    assert looks(back[0]) == looks(tensor)
    assert back[1]["key"] is back[0]
    if tensor.untyped_storage().nbytes():
        fetched(make, lambda found: check_looks(found, make()))


def check_looks(found: Any, tensor: Any) -> None:
    assert looks(found) == looks(tensor)


def test_the_memory_itself_is_written_and_read() -> None:
    """Packing copies nothing, leaves a storage that can be resized, and keeps it as long as its bytes."""
    tensor = torch.arange(4.0)
    head, (buffer,) = rt.adapter.pack(tensor)
    tensor[0] = 7
    assert memoryview(buffer).cast("B").cast("f")[0] == 7
    assert tensor.untyped_storage().resizable()
    address = tensor.data_ptr()
    del tensor
    assert memoryview(buffer).cast("B").cast("f").tolist() == [7, 1, 2, 3]

    def load(memory: Any) -> None:
        memory[:] = memoryview(buffer).cast("B")

    assert rt.adapter.unpack(head, load).data_ptr() != address


@pytest.mark.filterwarnings("ignore:Sparse invariant", "ignore:torch.quantize", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nn.Parameter(torch.ones(3)),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        lambda: torch.ones(2, device="meta"),
        lambda: network(),
    ],
    ids=["parameter", "sparse", "quantized", "meta", "module"],
)
def test_what_is_more_than_bytes_comes_back_by_pickle(make: Callable[[], Any]) -> None:
    """Parameters, modules, sparse and quantized tensors, and tensors without memory."""
    value = make()
    back = unpacked(value)
    assert type(back) is type(value)
    assert repr(back) == repr(value)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("kind", ["coo", "csr", "csc", "bsr", "bsc"])
def test_a_sparse_tensor_counts_what_it_has(kind: str) -> None:
    """Its indices and its elements, not the zeros: by itself and in a list, and it comes back from a disk."""

    def make() -> Any:
        dense = torch.eye(400)
        blocks = {"blocksize": (1, 1)} if kind.startswith("b") else {}
        return dense.to_sparse(layout=getattr(torch, f"sparse_{kind}"), **blocks)

    assert 2 * 400 * 4 < rc.sizeof(make()) < rc.sizeof([make()]) < 400 * 400
    fetched(make, lambda found: check_same(found, make()))


def check_same(found: Any, tensor: Any) -> None:
    assert repr(found) == repr(tensor)


def test_a_graph_is_not_packed() -> None:
    """What autograd knows of a tensor would be lost: it is refused, inside of something, too."""
    leaf = torch.ones(2, requires_grad=True)
    leaf.sum().backward()
    for value in (torch.ones(2, requires_grad=True) * 2, leaf, [leaf]):
        with pytest.raises(ValueError, match="autograd"):
            packed(value)


def test_memory_of_other_processes_is_not_packed() -> None:
    """What they may write to stays."""
    with pytest.raises(ValueError, match="others"):
        packed(torch.ones(2).share_memory_())


def test_a_storage_comes_back() -> None:
    """With its bytes."""
    storage = torch.arange(3.0).untyped_storage()
    assert unpacked(storage).tolist() == storage.tolist()


def test_the_kit_passes() -> None:
    """The adapter keeps its promises for tensors of their own, views, and empty ones."""
    makes: list[Callable[[], Any]] = [
        lambda: torch.arange(12.0).reshape(3, 4),
        lambda: torch.arange(12.0).reshape(3, 4).t()[1:],
        lambda: torch.ones(3, dtype=torch.bfloat16),
    ]
    check_adapter(rt.adapter, makes, view=lambda tensor: tensor[:1], change=lambda tensor: tensor.neg_())


# Blocks


@settings(max_examples=150)
@given(PROGRAMS, st.sampled_from([None, 1_200, 2_000, 3_000]), st.booleans())
def test_a_program_inside_of_a_block_that_moves(program: list[Instruction], budget: int | None, always: bool) -> None:
    """Bytes, strides, gradients, sharing and errors are those of plain torch, whatever is moved or made again."""
    block = rt.budget(budget, tiers=rc.Host(always=always))
    with block:
        inside = run(program, block)
    check_peak(block, inside.most)
    plain = run(program, None, stop=inside.stopped)
    assert inside.raised == plain.raised
    assert not block.stats().used
    if inside.stopped is None:
        assert [look(tensor) for tensor in inside.tensors] == [look(tensor) for tensor in plain.tensors]
        assert shared(inside.tensors) == shared(plain.tensors)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, 1e-2, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, foreach=True),
}


def trained(optimizer: str) -> list[Any]:
    """Losses, parameters, buffers and gradients of a few steps."""
    torch.manual_seed(1)
    module = network(width=8, depth=8)
    losses = train(module, OPTIMIZERS[optimizer](module.parameters()), steps=4, rows=256)
    return [*losses, *left_in(module)]


@pytest.mark.parametrize("foresight", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_training_that_moves_changes_nothing(optimizer: str, foresight: bool, tmp_path: Path) -> None:
    """With half the memory and a disk that takes all, losses, parameters and gradients are those of plain torch."""
    plain = trained(optimizer)
    with rt.budget() as block:
        trained(optimizer)
        budget = block.stats().peak // 2
    with rt.budget(budget, tiers=rc.Disk(folder=tmp_path, always=True), foresight=foresight) as block:
        found = trained(optimizer)
        stats = block.stats()
    assert alike(plain, found) == []
    (tier,) = stats.tiers
    assert tier.moves > 0
    assert tier.fetches > 0
    assert stats.peak <= budget + stats.overshoot


def test_a_source_that_is_written_moves_anew(tmp_path: Path) -> None:
    """A copy from before a write in place is never read again."""
    weight = torch.ones(256)
    with rt.budget(tiers=rc.Disk(folder=tmp_path, always=True)) as block:
        made = weight * 2
        block.cache.release_memory()  # moves it, and leaves a copy
        assert made[0] == 2
        block.commit()  # now it is a source
        for _ in range(3):
            made.requires_grad_(False).add_(1)
            weight.mul_(2)
            weight[:1].neg_()
            block.cache.release_memory()
            assert block.cache.stats().pools[0].used == 0
    assert (made[0].item(), weight[0].item(), weight[1].item()) == (5, -8, 8)


def below_its_floor(optimizer: str) -> tuple[list[Any], list[Any]]:
    """A training in which one parameter after the other is changed: losses; parameters, buffers and gradients."""
    torch.manual_seed(1)
    module = network(width=32, depth=6)
    make = {
        "momentum": lambda parameters: torch.optim.SGD(parameters, 1e-2, momentum=0.9, foreach=False),
        "AdamW": lambda parameters: torch.optim.AdamW(parameters, foreach=False, amsgrad=True),
        "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, foreach=False, momentum=0.9),
    }[optimizer]
    return train(
        torch.nn.Sequential(torch.nn.Linear(8, 32), module), make(module.parameters()), steps=3, rows=16
    ), left_in(module)


@pytest.mark.parametrize("optimizer", ["momentum", "AdamW", "RMSprop"])
def test_a_training_below_its_floor(optimizer: str, tmp_path: Path) -> None:
    """Parameters, gradients and what an optimizer remembers move as well: together they are larger than the budget."""
    plain = below_its_floor(optimizer)
    sizes = [tensor.numel() * tensor.element_size() for tensor in plain[1]]
    budget = max(12 * max(sizes), sum(sizes) // 2)
    assert budget < sum(sizes), "the model is too small to tell"
    with rt.budget(budget, tiers=rc.Disk(folder=tmp_path), foresight=False) as block:
        found = below_its_floor(optimizer)
        stats = block.stats()
    assert alike(plain[0], found[0]) == []
    assert alike(plain[1], found[1]) == []
    assert stats.peak <= budget
