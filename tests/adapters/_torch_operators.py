"""Calls of operators from torch's own database, in plain torch and inside of a block that evicts after each call.

Every tensor of a sample is made inside of the block too, so that the operator meets arguments whose memory is gone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

import recompute_torch as rt

SEED: Final = 20_261_121

VARIANTS: Final = ("forward", "gradients", "second gradients", "in place", "out")
"""What is tried with each sample, where the operator supports it."""

DTYPES: Final = (torch.float64, torch.float32, torch.complex128, torch.int64, torch.bool, torch.bfloat16)
"""The first of these that an operator supports is used."""


UNINITIALISED: Final = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
)
"""What these return is whatever was in memory."""

SLOW: Final = frozenset(
    {"grid_sampler_3d", "linalg.householder_product", "nn.functional.cosine_embedding_loss", "ormqr"}
    | {"pca_lowrank", "svd_lowrank"}
)
"""Their formulas are long chains of small operators: tens of thousands of repeated runs for one sample."""


class Passing(TorchDispatchMode):
    """Does nothing; but some formulas of autograd are others while a mode is on, and round otherwise."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Evicting(TorchDispatchMode):
    """Evicts all that can be after each operator call."""

    def __init__(self, block: rt.budget) -> None:
        super().__init__()
        self._block = block

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._block.cache.release_memory()
        return result


@dataclass
class Outcome:
    """What came out of a call: tensors and the like, or the error; and how many operators ran again."""

    tensors: list[Any] = field(default_factory=list)
    error: BaseException | None = None
    repeated: int = 0


def operators() -> list[Any]:
    """The database, in the order of the names."""
    from torch.testing._internal.common_methods_invocations import op_db  # takes seconds

    return sorted(op_db, key=name_of)


def name_of(op: Any) -> str:
    """The name of an entry of the database."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def uncomparable(op: Any) -> bool:
    """Whether two runs of plain torch may differ."""
    return op.name in UNINITIALISED


def dtype_of(op: Any) -> torch.dtype | None:
    """In which dtype an operator is tried; None: it has none on the CPU."""
    return next((dtype for dtype in DTYPES if op.supports_dtype(dtype, "cpu")), None)


def samples(op: Any, dtype: torch.dtype) -> Iterator[Any]:
    """The samples of an operator, always the same."""
    torch.manual_seed(SEED)
    grad = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield from op.sample_inputs("cpu", dtype, requires_grad=grad)


def compared(variant: str, op: Any, sample: Any) -> tuple[Outcome, str] | None:
    """What a block makes of one variant of an operator; None: it has no such variant.

    And how that differs: "" for not at all, "mode" for as it does in any dispatch mode.
    """
    plain = called(variant, op, sample, "plain")
    other = called(variant, op, sample, "block")
    if plain is None or other is None:
        return None
    found = difference(plain, other)
    if found and (passing := called(variant, op, sample, "mode")) and not difference(passing, other):
        return other, "mode"
    return other, found or ""


def called(variant: str, op: Any, sample: Any, where: str) -> Outcome | None:
    """What comes out of a variant of an operator, "plain", in a "mode" or in a "block"; None: it has none."""
    function = _VARIANTS[variant](op, sample)
    if function is None:
        return None
    outcome = Outcome()
    torch.manual_seed(SEED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        block = rt.budget() if where == "block" else None
        inner = Evicting(block) if block else Passing() if where == "mode" else nullcontext()
        with block or nullcontext(), inner:
            try:
                outcome.tensors = list(tree_flatten(function())[0])
            except Exception as error:
                outcome.error = error.with_traceback(None)
    outcome.tensors.append(torch.get_rng_state())
    if block is not None:
        outcome.repeated = block.stats().rematerializations
    return outcome


def difference(plain: Outcome, other: Outcome) -> str | None:
    """In what two outcomes differ, the bytes of all tensors included; None: in nothing."""
    if plain.error is not None or other.error is not None:
        if type(plain.error) is type(other.error):
            return None
        return f"{plain.error!r:.300} became {other.error!r:.300}"
    if len(plain.tensors) != len(other.tensors):
        return f"{len(plain.tensors)} results became {len(other.tensors)}"
    for number, (one, two) in enumerate(zip(plain.tensors, other.tensors, strict=True)):
        if type(one) is not type(two):
            return f"result {number}: {type(one)} became {type(two)}"
        if isinstance(one, torch.Tensor):
            if (looks := _looks(one)) != _looks(two):
                return f"result {number}: {looks} became {_looks(two)}"
            if content(one) != content(two):
                return f"result {number}: other content"
        elif one != two and not (one != one and two != two):
            return f"result {number}: {one!r} became {two!r}"
    return None


def _looks(tensor: Any) -> Any:
    strides = (tensor.stride(), tensor.storage_offset()) if tensor.layout is torch.strided else None
    return tensor.dtype, tensor.shape, strides, tensor.layout, tensor.requires_grad, tensor.is_conj(), tensor.is_neg()


def content(tensor: Any) -> bytes:
    """The bytes of the elements in order."""
    if tensor.is_meta:
        return b""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    plain = tensor.detach().resolve_conj().resolve_neg().flatten().clone(memory_format=torch.contiguous_format)
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def fresh(sample: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The arguments of a sample on memory of their own, made where this is called; shared ones are shared."""
    made: dict[int, Any] = {}

    def again(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in made:
            plain = value.detach()
            if plain.layout is torch.strided and not plain.is_conj() and not plain.is_neg() and plain.numel():
                size = plain.untyped_storage().nbytes() // plain.element_size()
                whole = plain.as_strided((size,), (1,), 0).clone()
                copy = (
                    whole
                    if whole.stride() == plain.stride()
                    else whole.as_strided(plain.shape, plain.stride(), plain.storage_offset())
                )
            else:
                copy = plain.clone()
            made[id(value)] = copy.requires_grad_(value.requires_grad)
        return made[id(value)]

    return tree_map(again, (sample.input, sample.args, sample.kwargs))


def _forward(op: Any, sample: Any) -> Callable[[], Any] | None:
    def call() -> Any:
        given, args, kwargs = fresh(sample)
        return op(given, *args, **kwargs)

    return call


def _gradients(op: Any, sample: Any, second: bool = False) -> Callable[[], Any] | None:
    if not op.supports_autograd or (second and not op.supports_gradgrad):
        return None
    if not any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in _leaves(sample)):
        return None

    def call() -> Any:
        given, args, kwargs = fresh(sample)
        wanted = [arg for arg in tree_flatten((given, args, kwargs))[0] if _differentiable(arg)]
        wanted = list({id(tensor): tensor for tensor in wanted}.values())
        outputs = sample.output_process_fn_grad(op(given, *args, **kwargs))
        outputs = [output for output in tree_flatten(outputs)[0] if _differentiable(output)]
        grads = _grads(outputs, wanted, second)
        if second:
            grads = [grad for grad in grads if grad is not None and grad.requires_grad]
            grads = _grads(grads, wanted, False) if grads else []
        return grads

    return call


def _grads(outputs: list[Any], inputs: list[Any], graph: bool) -> list[Any]:
    weights = [
        torch.arange(1, output.numel() + 1, dtype=output.dtype).cos().reshape(output.shape) for output in outputs
    ]
    return list(torch.autograd.grad(outputs, inputs, weights, create_graph=graph, allow_unused=True))


def _differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _in_place(op: Any, sample: Any) -> Callable[[], Any] | None:
    function = op.get_inplace()
    if function is None or sample.broadcasts_input or not isinstance(sample.input, torch.Tensor):
        return None

    def call() -> Any:
        given, args, kwargs = fresh(sample)
        given = given.clone()
        view = given.view_as(given)
        return function(given, *args, **kwargs), given, view

    return call


def _out(op: Any, sample: Any) -> Callable[[], Any] | None:
    if not op.supports_out:
        return None
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given, args, kwargs = fresh(sample)
        try:
            expected = op(given, *args, **kwargs)
        except Exception:
            return None
    if not all(isinstance(leaf, torch.Tensor) for leaf in tree_flatten(expected)[0]):
        return None

    def call() -> Any:
        with torch.no_grad():
            given, args, kwargs = fresh(sample)
            out = tree_map(lambda tensor: torch.zeros_like(tensor).add_(1), expected)
            out = tuple(out) if isinstance(expected, (tuple, list)) and not isinstance(expected, list) else out
            return op(given, *args, **kwargs, out=out), out

    return call


def _leaves(sample: Any) -> list[Any]:
    return tree_flatten((sample.input, sample.args, sample.kwargs))[0]


_VARIANTS: Final[dict[str, Callable[[Any, Any], Callable[[], Any] | None]]] = {
    "forward": _forward,
    "gradients": _gradients,
    "second gradients": lambda op, sample: _gradients(op, sample, second=True),
    "in place": _in_place,
    "out": _out,
}
