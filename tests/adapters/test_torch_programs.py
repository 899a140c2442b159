"""Random programs of views, writes and gradients: a block changes nothing but where the memory is."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the extra 'torch' is not installed")

from _torch_operators import Evicting  # noqa: E402  # after importorskip
from _torch_programs import INSTRUCTIONS, Instruction, World, check_peak, look, run, shared  # noqa: E402  # the same

import recompute_torch as rt  # noqa: E402

NUMBERS = st.integers(0, 12)
NAMES = st.one_of(st.sampled_from(sorted(INSTRUCTIONS)), st.sampled_from(["evict", "delete", "requires_grad"]))
PROGRAMS: st.SearchStrategy[list[Instruction]] = st.lists(st.tuples(NAMES, NUMBERS, NUMBERS, NUMBERS), max_size=40)
BUDGETS = st.sampled_from([None, 1_200, 2_000, 3_000])

EMPTY_VIEW: list[Instruction] = [
    ("clone", 8, 11, 6),
    ("slice", 5, 6, 9),
    ("delete", 1, 5, 12),
    ("index_select", 6, 5, 9),
    ("unbind", 5, 12, 10),
    ("setitem", 7, 5, 11),
    ("evict", 10, 11, 12),
]
"""The last write is to an empty view of a few integers."""


pytestmark = pytest.mark.usefixtures("path")


@settings(max_examples=150)
@example([("narrow", 0, 1, 4), ("evict", 1, 0, 0), ("numpy", 0, 9, 5), ("evict", 1, 0, 0)], None)
@example([("maximum", 2, 7, 12), ("evict", 1, 2, 10), ("copy_ quietly", 7, 1, 9)], None)
@example([("evict", 7, 6, 7), ("seeded", 0, 10, 7), ("evict", 1, 0, 0)], None)
@example([("sort out", 9, 12, 8), ("evict", 1, 0, 0)], None)
@example(EMPTY_VIEW, None)
@example([("unbind", 9, 6, 0), ("decheckpoint", 8, 11, 3), ("out", 0, 7, 9)], None)
@example([(name, 0, 0, 3) for name in ("jvp", "forward mode", "hessian", "make_fx", "meta")], 1_200)
@given(PROGRAMS, BUDGETS)
def test_a_program_inside_of_a_block(program: list[Instruction], budget: int | None) -> None:
    """Bytes, strides, versions, gradients, sharing and errors are those of plain torch, whatever is evicted.

    While it runs, the books agree with what is there, and the peak with the budget; afterwards the tensors are
    ordinary, the cache holds nothing, and what was brought back is in the overshoot.
    """
    block = rt.budget(budget)
    with block:
        inside = run(program, block)
    check_peak(block, inside.most)
    plain = run(program, None, stop=inside.stopped)
    assert inside.raised == plain.raised
    check_ordinary(inside)
    assert not block.stats().used
    assert len(inside.tensors) == len(plain.tensors)
    if inside.stopped is None:  # an instruction that found no room may have written already
        assert [look(tensor) for tensor in inside.tensors] == [look(tensor) for tensor in plain.tensors]
        assert shared(inside.tensors) == shared(plain.tensors)
        assert torch.equal(inside.generator.get_state(), plain.generator.get_state())


def check_ordinary(world: World) -> None:
    """All tensors have their bytes, and work without a block."""
    for tensor in world.tensors:
        assert not hasattr(tensor.untyped_storage(), "_recompute")
        assert (tensor.detach() == tensor.detach()).all() in (True, False) or not tensor.numel()


ALIASES: dict[str, Any] = {
    "out is an input": lambda x, y: torch.maximum(x, y, out=x),
    "out is a view of an input": lambda x, y: torch.add(x[:], y, out=x),
    "a copy of itself": lambda x, y: x.copy_(x.clone().flip(0)),
    "a copy of its transpose": lambda x, y: x.copy_(x.t().clone()),
    "apply_": lambda x, y: x.apply_(lambda element: element * 3),
    "map_": lambda x, y: x.map_(y, lambda one, other: one - other),
    "resized storage": lambda x, y: (x.untyped_storage().resize_(0), x.untyped_storage().resize_(64), x.fill_(2)),
    "set_": lambda x, y: x.set_(y).mul_(3),
    "data": lambda x, y: setattr(x, "data", y * 2),
    "shared memory": lambda x, y: x.share_memory_().mul_(2),
    "numpy": lambda x, y: x.numpy().fill(4),
}


@pytest.mark.parametrize("name", ALIASES)
def test_writes_that_are_hard_to_see(name: str) -> None:
    """What a write does to the tensor, and not to what was made from it before, is as in plain torch."""
    plain = aliased(name, None)
    with rt.budget() as block:
        inside = aliased(name, block)
    assert not block.stats().used
    for one, other in zip(plain, inside, strict=True):
        assert torch.equal(one, other)


def aliased(name: str, block: rt.budget | None) -> list[Any]:
    """The tensors that were there before, and what was made from them before and after the write."""
    x, y = torch.arange(16.0).reshape(4, 4) + 1, torch.ones(4, 4) * 9
    before = x * 2
    if block is not None:
        block.cache.release_memory()
    ALIASES[name](x, y)
    after = x + y
    if block is not None:
        block.cache.release_memory()
    return [x, y, before, after]


READERS: dict[str, Any] = {
    "torch.tensor of tensors": lambda x: torch.tensor([x.sum(), x[0, 0], 2.0]),
    "new_tensor": lambda x: x.new_tensor([x.sum(), 1.0]),
    "tensor_split by a tensor": lambda x: torch.tensor_split(x.flatten(), torch.tensor([3, 7]) + 0)[1],
    "packed sequences": lambda x: torch.nn.utils.rnn.pad_packed_sequence(
        torch.nn.utils.rnn.pack_padded_sequence(x.reshape(4, 2, 2), torch.tensor([4, 2]) + 0)
    )[0],
    "to_dlpack": lambda x: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x)),
    "sobol": lambda x: torch.quasirandom.SobolEngine(2, scramble=True, seed=1).draw(4) + x.sum(),
    "sparse": lambda x: (x.to_sparse() * 2).to_dense(),
    "sparse from parts": lambda x: torch.sparse_coo_tensor(torch.arange(4).repeat(2, 1) + 0, x[0], (4, 4)).to_dense(),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize(),
    "nested": lambda x: torch.nested.to_padded_tensor(torch.nested.nested_tensor([x[0], x[1, :2]]) * 2, 0.0),
    "default dtype": lambda x: _halves(torch.arange(4) + 0),
    "batch norm": lambda x: _batch_norm(x),
    "zero tensor": lambda x: torch._efficientzerotensor(4) + x[0],
}


def _halves(integers: Any) -> Any:
    torch.set_default_dtype(torch.float64)
    try:
        return integers / 2
    finally:
        torch.set_default_dtype(torch.float32)


def _batch_norm(x: Any) -> Any:
    mean, variance = torch.zeros(4) + 0, torch.ones(4) + 0
    made = torch.nn.functional.batch_norm(x, mean, variance, training=True)
    return torch.cat([made[0], mean, variance])


@pytest.mark.filterwarnings("ignore:Sparse invariant", "ignore:torch.quantize", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("every", [False, True], ids=["evicted at the end", "evicted after each operator"])
@pytest.mark.parametrize("name", READERS)
def test_code_that_reads_memory_without_an_operator(name: str, every: bool) -> None:
    """It finds the bytes there, and what it makes is made again as it was."""
    plain = READERS[name](torch.arange(16.0).reshape(4, 4) + 1)
    with rt.budget() as block, Evicting(block) if every else nullcontext():
        made = READERS[name](torch.arange(16.0).reshape(4, 4) + 1)
        block.cache.release_memory()
    assert torch.equal(plain, made)
