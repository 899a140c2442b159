"""What the schema of an operator says about it: whether it makes, writes, or only looks; asked once per overload."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

What = Literal["makes", "writes", "views", "reshapes", "composes", "buffers", "other"]

HIDDEN: Final = frozenset(
    {"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm", "aten::_native_batch_norm_legit"}
    | {"aten::_batch_norm_with_update", "aten::batch_norm_update_stats", "aten::batch_norm_gather_stats"}
    | {"aten::batch_norm_gather_stats_with_counts"}
)
"""Operators that write running statistics, whatever their schema says, and do not read them while they do."""

_STATISTICS: Final = ("running_mean", "running_var")

_STATE: Final = "dropout_state"
"""What `_cudnn_rnn` and `miopen_rnn` draw from if it is given, and write, though their schemas do not say so."""

OVERWRITES: Final = frozenset(
    {"aten::copy_", "aten::zero_", "aten::fill_", "aten::normal_", "aten::uniform_", "aten::exponential_"}
    | {"aten::bernoulli_", "aten::random_", "aten::geometric_", "aten::log_normal_", "aten::cauchy_"}
)
"""In-place operators for whose result it does not matter what was there before."""

UNSTEADY: Final = "aten::linalg_lstsq"
"""On a CPU, the last bits of what it makes differ from run to run, in plain torch, too."""

STREAMS: Final = "aten::record_stream"
"""It tells the allocator that another stream uses the memory, which it knows by the storage that owns it."""

BUFFERS: Final = re.compile(r"aten::(new_)?(empty|zeros)(_like|_strided|_permuted)?$")
"""What they make is filled later, by code that need not be an operator: extensions get the address of such tensors."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What one overload does."""

    what: What
    name: str
    written: tuple[int | str, ...] = ()  # positions and names of the arguments that it writes
    lists: bool = False  # among these are lists of tensors
    replaced: bool = False  # what it writes does not depend on what was there, if it covers all of it
    hidden: tuple[int, ...] = ()  # positions of running statistics
    training: int | None = None  # position of the argument that says whether these are written; None: always
    seeded: bool = False  # it draws from a generator
    state: int | None = None  # position of a generator that is a tensor, and cannot be put back to an earlier state
    once: bool = False  # another run would make something else
    self_only: bool = False  # it writes its first argument, and nothing else
    plain: bool = False  # it only makes, and neither hides nor draws anything
    single: bool = False  # it makes or writes one tensor, as far as the schema says
    own: bool = False  # it is one of torch's own: no function in Python runs in it
    pointwise: bool = False  # it makes one tensor, element by element
    numbers: frozenset[int] = frozenset()  # positions of numbers that do not decide the size of what it makes

    def advanced(self, args: tuple[Any, ...]) -> list[Any]:
        """What this call draws from and writes, so that it cannot be repeated: a tensor, or nothing."""
        drawn = args[self.state : self.state + 1] if self.state is not None else ()
        return [tensor for tensor in drawn if tensor is not None]

    def hides(self, args: tuple[Any, ...]) -> bool:
        """Whether this call writes its running statistics."""
        return bool(self.hidden) and (self.training is None or bool(args[self.training]))


def rule_of(func: Any) -> Rule:
    """The rule of an operator overload; what has no schema is other."""
    schema = getattr(func, "_schema", None)
    if schema is None or not isinstance(func, torch._ops.OpOverload):
        return Rule("other", str(func))
    name = schema.name
    seeded = torch.Tag.nondeterministic_seeded in func.tags
    if BUFFERS.match(name) and not any(argument.is_out for argument in schema.arguments):
        return Rule("buffers", name)
    keys = torch._C.DispatchKey
    direct = any(func.has_kernel_for_dispatch_key(key) for key in (keys.CPU, keys.CUDA))
    if not direct and func.has_kernel_for_dispatch_key(keys.CompositeImplicitAutograd):
        return Rule("composes", name)  # it arrives here as a whole only in inference mode
    if name in ("aten::_efficientzerotensor", "aten::_unsafe_view"):  # no memory; that of its argument
        return Rule("views", name)
    # A view that is no tensor with a plain storage, which has to stay; a generator, which is a tensor; news for an
    # allocator, which the schema calls a write.
    if name in ("aten::_nested_view_from_buffer", "aten::_cudnn_init_dropout_state", STREAMS):
        return Rule("other", name)
    if torch.Tag.inplace_view in func.tags:
        return Rule("reshapes", name)
    returns = schema.returns
    names = [argument.name for argument in schema.arguments]
    hidden = tuple([number for number, argument in enumerate(names) if name in HIDDEN and argument in _STATISTICS])
    training = names.index("training") if hidden and "training" in names else None
    own = name.startswith("aten::")
    common: dict[str, Any] = {"hidden": hidden, "training": training, "seeded": seeded, "own": own}
    written: list[int | str] = []
    lists = replaced = False
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write and position not in hidden:
            written.append(argument.name if argument.kwarg_only else position)
            lists = lists or "List" in str(argument.type) or "[]" in str(argument.type)
            replaced = name in OVERWRITES or argument.is_out
    if written:
        alone = written == [0] and not lists and not hidden
        single = len(written) == 1 and all(result.alias_info is not None for result in returns)
        return Rule("writes", name, tuple(written), lists, replaced, self_only=alone, single=single, **common)
    if not any("Tensor" in str(result.type) for result in returns):
        return Rule("other", name, own=own)
    if all(result.alias_info is not None for result in returns):
        return Rule("views", name)
    state = names.index(_STATE) if _STATE in names else None
    once = name == UNSTEADY
    plain = not hidden and not seeded and state is None and not once
    single = len(returns) == 1 and str(returns[0].type) == "Tensor"
    pointwise = own and plain and single and torch.Tag.pointwise in func.tags
    more: dict[str, Any] = {"plain": plain, "single": single, "pointwise": pointwise, "numbers": _numbers(schema)}
    return Rule("makes", name, state=state, once=once, **more, **common)


_OPERANDS: Final = frozenset({"Tensor", "Optional[Tensor]", "number", "Optional[number]"})


def _numbers(schema: Any) -> frozenset[int]:
    """Positions of operands: a number there stands beside tensors. Sizes, dimensions and steps are of other types."""
    given = [str(argument.type) for argument in schema.arguments]
    beside = "Tensor" in given  # else they may be the ends of a range
    return frozenset([position for position, kind in enumerate(given) if beside and kind in _OPERANDS])
