"""Random programs of views, in-place operations and gradients over a few tensors, in plain torch and in a block.

A program is a list of instructions: a name and three numbers, which choose the operands among the tensors that are
there. What it raises belongs to its result.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import recompute as rc
import recompute_torch as rt
from recompute.testing import check_invariants

MOST: Final = 256
"""Elements of a tensor, beyond which an instruction makes nothing."""


@dataclass
class World:
    """Tensors, and what happened to them."""

    block: rt.budget | None
    tensors: list[Any] = field(default_factory=list)
    raised: list[str] = field(default_factory=list)
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(7))
    stopped: int | None = None  # the instruction that found no room
    most: int = 0  # the largest budget that there was (bytes)

    def __getitem__(self, number: int) -> Any:
        return self.tensors[number % len(self.tensors)]

    def add(self, made: Any) -> None:
        for value in [made] if isinstance(made, torch.Tensor) else made:
            if isinstance(value, torch.Tensor) and value.numel() <= MOST and len(self.tensors) < 40:
                value._born = value._version  # autograd adds up out of place while a mode is on, and counts otherwise
                self.tensors.append(value)


Instruction = tuple[str, int, int, int]


def run(program: list[Instruction], block: rt.budget | None, stop: int | None = None) -> World:
    """Run a program until its end, the first lack of room, or an instruction that is not to run any more."""
    world = World(block)
    rebudget(world, None if block is None else block.budget)
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for start in (torch.arange(12.0).reshape(3, 4) / 7, torch.ones(4), torch.arange(6).reshape(2, 3)):
            world.add([start, start + 1])
        for number, (name, *numbers) in enumerate(program):
            if number == stop:
                break
            try:
                INSTRUCTIONS[name](world, *numbers)
            except rc.BudgetError:
                world.stopped = number
                break
            except Exception as error:
                world.raised.append(f"{number} {name}: {type(error).__name__} {str(error).splitlines()[0]:.60}")
            if block is not None:
                check_books(block, world.most)
    return world


def rebudget(world: World, budget: int | None) -> None:
    """Another budget for the block, or the one that it has."""
    if world.block is not None and budget is not None:
        world.most = max(world.most, budget)
        world.block.budget = budget


def check_records(block: rt.budget) -> None:
    """What is remembered agrees with what is there, on either path."""
    if block.stats().path == "native":
        block.check()  # type: ignore[attr-defined]  # it is a native one
    else:
        check_invariants(block.cache, [tensor._recompute for tensor in block._tracker.known()])


def check_books(block: rt.budget, most: int) -> None:
    """The cache agrees with what it holds, within its budget; `most` is the largest that there was."""
    check_records(block)
    check_peak(block, most)
    stats = block.stats()
    if block.budget is not None:
        assert stats.used <= block.budget + stats.overshoot


def check_peak(block: rt.budget, most: int) -> None:
    """What was ever counted was within the budget and the overshoot; nothing is counted where no memory is."""
    stats = block.stats()
    assert {pool.device for pool in stats.pools} <= {"cpu"}
    if block.budget is not None:
        assert stats.peak <= most + stats.overshoot


def look(tensor: Any) -> Any:
    """All there is to see of a tensor, its bytes included."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    try:
        grad = tensor.grad if tensor.is_leaf else None
    except RuntimeError as error:  # a view that torch has given up
        return str(error)
    return (
        type(tensor),
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.requires_grad,
        tensor._version - getattr(tensor, "_born", tensor._version),
        tensor._is_view(),
        None if grad is None else look(grad),
        tensor.untyped_storage().nbytes(),
        tensor.untyped_storage().resizable(),
        plain.numpy().tobytes(),
    )


def shared(tensors: list[Any]) -> list[int]:
    """Which tensors share a storage: the number of the first one that does."""
    places = [tensor.untyped_storage()._cdata for tensor in tensors]
    return [places.index(place) for place in places]


def _unary(name: str) -> Callable[..., None]:
    return lambda w, a, b, c: w.add(getattr(torch, name)(w[a]))


def _binary(name: str) -> Callable[..., None]:
    return lambda w, a, b, c: w.add(getattr(torch, name)(w[a], w[b]))


def _in_place(name: str, *arguments: Any) -> Callable[..., None]:
    def write(w: World, a: int, b: int, c: int) -> None:
        getattr(w[a], name)(*arguments)

    return write


def _in_place_with(name: str) -> Callable[..., None]:
    def write(w: World, a: int, b: int, c: int) -> None:
        getattr(w[a], name)(w[b])

    return write


def _no_grad(function: Callable[..., None]) -> Callable[..., None]:
    def quiet(w: World, a: int, b: int, c: int) -> None:
        with torch.no_grad():
            function(w, a, b, c)

    return quiet


def _dim(tensor: Any, number: int) -> int:
    return number % max(tensor.dim(), 1)


def _out(w: World, a: int, b: int, c: int) -> None:
    with torch.no_grad():
        torch.mul(w[a], w[b].reshape(-1)[0], out=w[c] if w[c].shape == w[a].shape else torch.ones(3))


def _sort_out(w: World, a: int, b: int, c: int) -> None:
    with torch.no_grad():
        values, indices = torch.empty(0, dtype=w[a].dtype), torch.ones(b % 5, dtype=torch.int64)
        torch.sort(w[a], out=(values, indices))
        w.add([values, indices])


def _setitem(w: World, a: int, b: int, c: int) -> None:
    w[a][b % 3 :] = w[c]


def _set_mask(w: World, a: int, b: int, c: int) -> None:
    w[a][w[b] > 1] = 0.5


def _index_put(w: World, a: int, b: int, c: int) -> None:
    rows = torch.tensor([b % w[a].shape[0], c % w[a].shape[0]])
    w[a].index_put_((rows,), torch.tensor(2.0, dtype=w[a].dtype), accumulate=bool(c % 2))


def _masked_fill(w: World, a: int, b: int, c: int) -> None:
    w[a].masked_fill_(w[b] > 1, 0.25)


def _requires_grad(w: World, a: int, b: int, c: int) -> None:
    w[a].requires_grad_(bool(b % 4))


def _backward(w: World, a: int, b: int, c: int) -> None:
    w[a].sum().backward(retain_graph=bool(b % 2))


def _grad(w: World, a: int, b: int, c: int) -> None:
    (grad,) = torch.autograd.grad((w[a] * w[a]).sum(), w[b], create_graph=bool(c % 2))
    w.add(grad)


def _grad_of_grad(w: World, a: int, b: int, c: int) -> None:
    (grad,) = torch.autograd.grad((w[a] * w[a]).sum(), w[b], create_graph=True)
    (grad.sin().sum()).backward()


def _forward_mode(w: World, a: int, b: int, c: int) -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(w[a], w[b])
        for number in range(c % 4):
            dual = (dual * 1.5, dual.sin(), dual + w[a].detach(), dual @ dual.t())[(a + number) % 4]
        w.add([part for part in forward_ad.unpack_dual(dual) if part is not None])


def _jvp(w: World, a: int, b: int, c: int) -> None:
    functions = (torch.sin, lambda x: (x * x).sum(), lambda x: x[b % 2 :].exp() * 0.5, lambda x: x / (1 + x * x))
    w.add(torch.func.jvp(functions[c % 4], (w[a].detach(),), (w[b].detach(),)))


def _hessian(w: World, a: int, b: int, c: int) -> None:
    w.add(torch.func.hessian(lambda x: (x * x * 0.5).sin().sum())(w[a].detach().reshape(-1)[: b % 4 + 1]))


def _make_fx(w: World, a: int, b: int, c: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        w.add(make_fx(lambda x: (x * 2).sin() + 1)(w[a].detach())(w[b].detach()))


def _meta(w: World, a: int, b: int, c: int) -> None:
    w.raised.append(str((w[a].to("meta") * 2 + torch.ones((), device="meta")).shape))


def _take_grad(w: World, a: int, b: int, c: int) -> None:
    if w[a].grad is not None:
        w.add(w[a].grad)
    if b % 2:
        w[a].grad = None


def _step(w: World, a: int, b: int, c: int) -> None:
    leaves = [tensor for tensor in w.tensors if tensor.is_leaf and tensor.requires_grad and tensor.grad is not None]
    if leaves:
        kinds = [{"foreach": True}, {"foreach": False}, {"fused": True}]
        torch.optim.Adam(leaves, lr=0.1, amsgrad=bool(b % 2), **kinds[c % 3]).step()


def _foreach(w: World, a: int, b: int, c: int) -> None:
    if not (w[a].is_floating_point() and w[b].is_floating_point() and w[c].is_floating_point()):
        return  # it would fail in the middle, and what torch has counted by then depends on the mode
    with torch.no_grad():
        if b % 3 == 0:
            torch._foreach_add_([w[a], w[b]], [w[a].clone(), w[b].clone()])
        elif b % 3 == 1:
            torch._foreach_mul_([w[a], w[c]], 0.5)
        else:
            w.add(torch._foreach_sub([w[a], w[b]], 1.0))


def _delete(w: World, a: int, b: int, c: int) -> None:
    if len(w.tensors) > 1:
        del w.tensors[a % len(w.tensors)]


def _set_data(w: World, a: int, b: int, c: int) -> None:
    w[a].data = w[b].detach() if c % 2 else w[b].detach() * 2


def _set(w: World, a: int, b: int, c: int) -> None:
    with torch.no_grad():
        if c % 2:
            w[a].set_(w[b])
        else:
            w.add(torch.empty(0, dtype=w[b].dtype).set_(w[b].untyped_storage()))


def _resize(w: World, a: int, b: int, c: int) -> None:
    before = w[a].untyped_storage().nbytes()
    w[a].resize_(b % 4, c % 7)
    if w[a].untyped_storage().nbytes() > before:
        w[a].zero_()  # the new bytes are whatever was there


def _numpy(w: World, a: int, b: int, c: int) -> None:
    array = w[a].detach().numpy()
    if array.size and b % 2:
        array.reshape(-1)[: c % 3] = 5


def _from_numpy(w: World, a: int, b: int, c: int) -> None:
    w.add(torch.from_numpy(np.arange(1.0 + b % 6)).float())


def _read(w: World, a: int, b: int, c: int) -> None:
    w.raised.append(repr([w[a].tolist(), w[b].sum().item(), bool((w[c] > 1).any()), repr(w[b].detach())]))


def _copies(w: World, a: int, b: int, c: int) -> None:
    pair = [w[a].detach(), w[b].detach()]
    w.add(copy.deepcopy(pair) if c % 2 else pickle.loads(pickle.dumps(pair)))


def _evict(w: World, a: int, b: int, c: int) -> None:
    if w.block is not None:
        w.block.cache.release_memory(None if a % 2 else b * 32 + 1)


def _rebudget(w: World, a: int, b: int, c: int) -> None:
    if w.block is not None and w.block.budget is not None:
        rebudget(w, max(w.block.budget - 64, 1024) if a % 2 else w.block.budget + 64)


def _commit(w: World, a: int, b: int, c: int) -> None:
    if w.block is not None:
        w.block.commit()


def _decheckpoint(w: World, a: int, b: int, c: int) -> None:
    if w.block is not None:
        rt.decheckpoint(w[a])


def _expand(w: World, a: int, b: int, c: int) -> None:
    w.add(w[a].expand(b % 3 + 1, *w[a].shape))


def _cat(w: World, a: int, b: int, c: int) -> None:
    w.add(torch.cat([w[a].reshape(-1), w[b].reshape(-1)]))


def _index_select(w: World, a: int, b: int, c: int) -> None:
    rows = torch.arange(b % 3)
    w.add(w[a].index_select(_dim(w[a], c), rows))


def _scatter(w: World, a: int, b: int, c: int) -> None:
    w[a].scatter_(_dim(w[a], b), torch.zeros(1, *[1] * (w[a].dim() - 1), dtype=torch.int64), 3)


def _seeded(w: World, a: int, b: int, c: int) -> None:
    generator = w.generator if c % 2 else None
    shape = w[a].shape
    match b % 6:
        case 0:
            w.add(torch.randn(shape, generator=generator))
        case 1:
            w.add(torch.rand_like(w[a]))
        case 2:
            w.add(torch.dropout(w[a], 0.5, True))
        case 3:
            w[a].normal_(generator=generator)
        case 4:
            w[a].bernoulli_(0.5, generator=generator)
        case _:
            w.add(torch.randperm(5, generator=generator))


def _reseed(w: World, a: int, b: int, c: int) -> None:
    torch.manual_seed(b)
    w.generator.manual_seed(c)


def _thread(w: World, a: int, b: int, c: int) -> None:
    from threading import Thread

    thread = Thread(target=lambda: w.add(w[a].detach() * 2 + 1))
    thread.start()
    thread.join()


INSTRUCTIONS: Final[dict[str, Callable[[World, int, int, int], None]]] = {
    # new tensors
    **{name: _unary(name) for name in ("sin", "clone", "relu", "neg", "cumsum0", "sum") if hasattr(torch, name)},
    **{name: _binary(name) for name in ("mul", "add", "maximum", "matmul", "where3") if hasattr(torch, name)},
    "float32": lambda w, a, b, c: w.add(w[a].to(torch.float32)),
    "float64": lambda w, a, b, c: w.add(w[a].to(torch.float64)),
    "contiguous": lambda w, a, b, c: w.add(w[a].contiguous()),
    "sum of one": lambda w, a, b, c: w.add(w[a].sum(_dim(w[a], b), keepdim=bool(c % 2))),
    "sort": lambda w, a, b, c: w.add(w[a].sort(_dim(w[a], b))),
    "softmax": lambda w, a, b, c: w.add(w[a].softmax(_dim(w[a], b))),
    "where": lambda w, a, b, c: w.add(torch.where(w[a] > 1, w[b], w[c])),
    "cat": _cat,
    "index_select": _index_select,
    "seeded": _seeded,
    "reseed": _reseed,
    "from numpy": _from_numpy,
    "copies": _copies,
    "thread": _thread,
    # views
    "slice": lambda w, a, b, c: w.add(w[a][b % 3 :: c % 2 + 1]),
    "select": lambda w, a, b, c: w.add(w[a].select(_dim(w[a], b), c % 2)),
    "transpose": lambda w, a, b, c: w.add(w[a].transpose(_dim(w[a], b), _dim(w[a], c))),
    "narrow": lambda w, a, b, c: w.add(w[a].narrow(_dim(w[a], b), c % 2, 1)),
    "flat": lambda w, a, b, c: w.add(w[a].view(-1)),
    "reshape": lambda w, a, b, c: w.add(w[a].reshape(-1, b % 3 + 1)),
    "expand": _expand,
    "unsqueeze": lambda w, a, b, c: w.add(w[a].unsqueeze(_dim(w[a], b))),
    "chunk": lambda w, a, b, c: w.add(w[a].chunk(b % 3 + 1, _dim(w[a], c))),
    "unbind": lambda w, a, b, c: w.add(w[a].unbind(_dim(w[a], b))[:4]),
    "split": lambda w, a, b, c: w.add(w[a].split(b % 3 + 1)[:4]),
    "diagonal": lambda w, a, b, c: w.add(w[a].diagonal()),
    "detach": lambda w, a, b, c: w.add(w[a].detach()),
    "data": lambda w, a, b, c: w.add(w[a].data),
    "as_strided": lambda w, a, b, c: w.add(w[a].as_strided((2,), (b % 3,), c % 3)),
    "bytes": lambda w, a, b, c: w.add(w[a].detach().view(torch.uint8)),
    # in place
    "add_": _in_place("add_", 1),
    "mul_": _in_place("mul_", 0.5),
    "zero_": _in_place("zero_"),
    "fill_": _in_place("fill_", 3),
    "exp_": _in_place("sin_"),
    "relu_": _in_place("relu_"),
    "squeeze_": _in_place("squeeze_"),
    "unsqueeze_": _in_place("unsqueeze_", 0),
    "transpose_": lambda w, a, b, c: w[a].transpose_(_dim(w[a], b), _dim(w[a], c)) and None,
    "detach_": _in_place("detach_"),
    "add_ tensor": _in_place_with("add_"),
    "mul_ tensor": _in_place_with("mul_"),
    "copy_": _in_place_with("copy_"),
    "copy_ quietly": _no_grad(_in_place_with("copy_")),
    "add_ quietly": _no_grad(_in_place_with("add_")),
    "setitem": _setitem,
    "set by mask": _set_mask,
    "index_put_": _index_put,
    "masked_fill_": _masked_fill,
    "scatter_": _scatter,
    "out": _out,
    "sort out": _sort_out,
    "foreach": _foreach,
    "set_data": _set_data,
    "set_": _set,
    "resize_": _resize,
    # gradients
    "requires_grad": _requires_grad,
    "backward": _backward,
    "grad": _grad,
    "grad of grad": _grad_of_grad,
    "forward mode": _forward_mode,
    "jvp": _jvp,
    "hessian": _hessian,
    "make_fx": _make_fx,
    "meta": _meta,
    "take grad": _take_grad,
    "step": _step,
    # reads, and the cache
    "read": _read,
    "numpy": _numpy,
    "delete": _delete,
    "evict": _evict,
    "rebudget": _rebudget,
    "commit": _commit,
    "decheckpoint": _decheckpoint,
}
