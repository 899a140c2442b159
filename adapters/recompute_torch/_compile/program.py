"""A joint graph as a program for the planners: its operators are calls; views and getitems cost nothing."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import torch
from torch import Tensor, fx
from torch._higher_order_ops.effects import has_effects
from torch.fx.experimental.symbolic_shapes import optimization_hint
from torch.utils._pytree import tree_leaves

from recompute.planners import ProgramBuilder, last_uses
from recompute.traces import Program
from recompute_torch._rules import HIDDEN

Node = fx.Node
Kind = Literal["leaf", "scalar", "item", "view", "effect", "call"]
Value = tuple[Node, int]
"""A leaf or a call, and the number of one of its results: memory of its own."""

BATCH_NORM: Final = torch.ops.aten._native_batch_norm_legit_functional.default
STATISTICS: Final = (3, 4)  # results of a batch norm: the new running statistics
FAR: Final = ("_c10d_functional", "c10d")  # namespaces of operators that other processes take part in
COPIED: Final = "recompute: copied"
"""In the meta of an input: it is copied as it comes in, and the copy is in memory until its last use."""
_STATE_BYTES: Final = {"cpu": 5056}  # bytes of the state of torch's generator
_STATE_BYTES_ELSEWHERE: Final = 16
_UNKNOWN_BYTES: Final = 4096  # what a size counts as that depends on data


@dataclass(frozen=True)
class Price:
    """What one run of an operator takes."""

    cost: float
    """Microseconds."""
    room: int = 0
    """Bytes that it needs beside its results while it runs."""
    hidden: tuple[int, ...] = ()
    """Bytes that the memory of each result has beyond what its shape says."""
    flops: float = 0.0
    """Floating-point operations by torch's formulas, which know matrix products and convolutions."""


@dataclass
class Joint:
    """The nodes in order, the forward ones first; and the calls among them as a program."""

    graph: fx.Graph
    results: int
    """How many outputs belong to the forward."""
    order: list[Node] = field(default_factory=list)
    backward: set[Node] = field(default_factory=set)
    kinds: dict[Node, Kind] = field(default_factory=dict)
    holds: dict[Node, list[Value | None]] = field(default_factory=dict)
    """Node -> whose memory each leaf of its value is; None: it is no tensor."""
    calls: list[Node] = field(default_factory=list)
    turn: int = 0
    """The number of the first call of the backward."""
    overwritten: set[Node] = field(default_factory=set)
    """Inputs that hold something else when the forward is over."""
    builder: ProgramBuilder[Value] = field(default_factory=lambda: ProgramBuilder(Program("step", unit=1e-6)))

    @property
    def program(self) -> Program:
        """The calls as a program."""
        return self.builder.program

    def outputs(self) -> Sequence[Any]:
        """What the graph returns: results of the forward, then gradients."""
        return tree_leaves(self.graph.output_node().args)

    def name(self, storage: int) -> str:
        """What made a storage of the program, for people."""
        for (node, number), value in self.builder.values.items():
            if self.program.storages[value] == storage:
                return describe(node) + (f"[{number}]" if number else "")
        return "workspace"


def read(graph: fx.Graph, results: int, price: Callable[[Node], Price] = lambda node: Price(0.0)) -> Joint:
    """The program of a joint graph, whose first `results` outputs are those of the forward; nothing costs anything
    unless it has a price.

    Inputs and parameters take no memory, being there anyway, but for those that are copied; tangents come between
    forward and backward.
    """
    joint = Joint(graph, results)
    _order(joint)
    for node in joint.order:
        _look(joint, node)
    _overwritten(joint)
    _fill(joint, price)
    return joint


def describe(node: Node) -> str:
    """An operator without its namespace and overload."""
    if node.op != "call_function":
        return node.name
    return str(getattr(node.target, "_overloadpacket", node.target)).removeprefix("aten.")


def seeded(node: Node) -> bool:
    """Whether it draws random numbers."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def state_bytes(node: Node) -> int:
    """Of the generator that a random operator draws from."""
    made = next(leaf for leaf in tree_leaves(node.meta["val"]) if isinstance(leaf, Tensor))
    return _STATE_BYTES.get(made.device.type, _STATE_BYTES_ELSEWHERE)


def with_states(joint: Joint) -> Program:
    """The program, if random operators that may run again keep the state of their generator until the last run."""
    program = joint.program.copy()
    steps, program.steps = program.steps, []
    for kind, which in steps:
        node = joint.calls[which] if kind == "call" else None
        if node is None or not seeded(node) or not repeatable(joint, node):
            program.steps.append((kind, which))
            continue
        call, state = program.calls[which], program.add_source(state_bytes(node))
        program.calls[which] = replace(call, arguments=(*call.arguments, state))
        program.steps += [(kind, which), ("drop", state)]
    return program


def repeatable(joint: Joint, node: Node) -> bool:
    """Whether a call may run twice. Not what has effects, is no plain operator, or reads what is overwritten."""
    target = node.target
    if target is BATCH_NORM:
        return bool(node.args[5])  # in training it does not read its statistics
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable or has_effects(target):
        return False
    if target.namespace in FAR or target._schema.name in HIDDEN:
        return False
    if seeded(node):
        if node.kwargs.get("generator") is not None or "generator" in target._overloadname:
            return False  # the state that is kept is the default one's
        if sum(nbytes(leaf) for leaf in tree_leaves(node.meta["val"]) if isinstance(leaf, Tensor)) <= state_bytes(node):
            return False  # that state takes as much
    return not any(value[0] in joint.overwritten for value in _used(joint, node))


def _order(joint: Joint) -> None:
    """All nodes but the output; what belongs to the backward comes last."""
    nodes = [node for node in joint.graph.nodes if node.op != "output"]
    late: set[Node] = set()
    for node in nodes:
        tag = node.meta.get("partitioner_tag") if node.op != "get_attr" else None  # constants are there anyway
        if tag in ("is_backward", "must_be_in_backward") or any(source in late for source in node.all_input_nodes):
            late.add(node)
    stack = [output for output in joint.outputs()[: joint.results] if isinstance(output, Node)]
    needed: set[Node] = set()
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += node.all_input_nodes
    joint.backward = late - needed
    joint.order = [node for node in nodes if node not in joint.backward]
    joint.order += [node for node in nodes if node in joint.backward]


def _look(joint: Joint, node: Node) -> None:
    """What kind of node it is, and whose memory its value is."""
    made = tree_leaves(node.meta.get("val"))
    if node.op in ("placeholder", "get_attr"):
        joint.kinds[node] = (
            "leaf" if any(isinstance(leaf, Tensor) for leaf in made) or node.op == "get_attr" else "scalar"
        )
        joint.holds[node] = [(node, 0) if isinstance(leaf, Tensor) else None for leaf in made]
        return
    target = node.target
    if target is operator.getitem:
        parent, index = node.args
        assert isinstance(parent, Node)
        assert isinstance(index, int)
        whole = parent.meta["val"]
        start = sum(len(tree_leaves(part)) for part in whole[:index])
        joint.kinds[node] = "item"
        joint.holds[node] = joint.holds[parent][start : start + len(made)]
        return
    owners: dict[int, Value] = {}
    for source in node.all_input_nodes:
        for value, tensor in zip(joint.holds[source], tree_leaves(source.meta.get("val")), strict=True):
            if value is not None:
                owners[storage_key(tensor)] = value
    mutable = isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable
    held: list[Value | None] = []
    for number, leaf in enumerate(made):
        held.append(owners.get(storage_key(leaf), (node, number)) if isinstance(leaf, Tensor) else None)
    joint.holds[node] = held
    if not node.users and (mutable or not any(held)):
        joint.kinds[node] = "effect"
    elif not any(held):
        joint.kinds[node] = "scalar"
    elif mutable or any(value and value[0] is node for value in held):
        joint.kinds[node] = "call"
    else:
        joint.kinds[node] = "view"


def _overwritten(joint: Joint) -> None:
    for node in joint.order:
        if joint.kinds[node] == "effect" and node.args and isinstance(node.args[0], Node):
            joint.overwritten.update(value[0] for value in joint.holds[node.args[0]] if value)
    inputs = {str(node.meta.get("desc")): node for node in joint.order if node.op == "placeholder"}
    for output in tree_leaves(joint.graph.output_node().meta.get("desc", ())):
        changed = inputs.get(str(getattr(output, "mutated_input", "")))
        if changed is not None:
            joint.overwritten.add(changed)


def _fill(joint: Joint, price: Callable[[Node], Price]) -> None:
    """The calls as a program. What cannot run twice is detached; everything is dropped after its last use."""
    joint.calls = [node for node in joint.order if joint.kinds[node] == "call"]
    joint.turn = sum(node not in joint.backward for node in joint.calls)
    builder = joint.builder
    device = _main_device(joint)
    last, lasting = _last_uses(joint)
    dying = iter(last)

    def size(node: Node, number: int) -> int:
        tensor = tree_leaves(node.meta["val"])[number]
        return nbytes(tensor) if tensor.device == device else 0

    def arrive() -> None:
        """The forward is over: it has written what it writes, has returned, and tangents come."""
        builder.step("get", [value for value in dict.fromkeys(_written(joint)) if value[0].op == "call_function"])
        builder.step("drop", next(dying))
        results = [output for output in joint.outputs()[: joint.results] if isinstance(output, Node)]
        held = dict.fromkeys(value for output in results for value in joint.holds[output] if value)
        builder.step("detach", [value for value in held if value[0].op == "call_function"])  # the caller has them
        for node in joint.order:
            if joint.kinds[node] == "leaf" and node in joint.backward:
                builder.source((node, 0), size(node, 0))

    for node in joint.order:
        if joint.kinds[node] == "leaf" and node not in joint.backward:
            builder.source((node, 0), size(node, 0) if node.meta.get(COPIED) else 0)
    for number, node in enumerate(joint.calls):
        if number == joint.turn:
            arrive()
        made, priced = _made(joint, node), price(node)
        hidden = dict(enumerate(priced.hidden))
        sizes = {value: size(*value) + hidden.get(value[1], 0) for value in made}
        room = builder.call(describe(node), _used(joint, node), sizes, priced.cost, priced.room)
        builder.program.steps.extend(("drop", value) for value in room)
        can = repeatable(joint, node)
        once = [value for value in made if not can or (node.target is BATCH_NORM and value[1] in STATISTICS)]
        builder.step("detach", once)
        builder.step("drop", next(dying))
    if joint.turn == len(joint.calls):
        arrive()
    builder.program.outputs = [builder.values[value] for value in lasting]


def _made(joint: Joint, node: Node) -> list[Value]:
    """The memory that a node makes."""
    return [value for value in joint.holds[node] if value and value[0] is node]


def _used(joint: Joint, node: Node) -> list[Value]:
    """The memory that a node reads."""
    return list(dict.fromkeys(value for source in node.all_input_nodes for value in joint.holds[source] if value))


def _written(joint: Joint) -> list[Value]:
    """What the forward reads and writes at its end."""
    effects = [node for node in joint.order if joint.kinds[node] == "effect" and node not in joint.backward]
    return [value for node in effects for value in _used(joint, node)]


def _last_uses(joint: Joint) -> tuple[list[list[Value]], list[Value]]:
    """What is dropped after each call, and, between forward and backward, once the forward has written; what stays.

    Forward inputs are not dropped, but for copies of them; results, gradients and what the backward writes at its end
    stay.
    """
    runs = [(_made(joint, node), _used(joint, node)) for node in joint.calls]
    runs.insert(joint.turn, ([], _written(joint)))
    outputs = [output for output in joint.outputs() if isinstance(output, Node)]
    lasting = {value for output in outputs for value in joint.holds[output] if value}
    for node in joint.order:
        if joint.kinds[node] == "effect" and node in joint.backward:
            lasting.update(_used(joint, node))
    inputs = [
        (node, 0)
        for node in joint.order
        if joint.kinds[node] == "leaf" and node not in joint.backward and not node.meta.get(COPIED)
    ]
    stays = [value for node in joint.order for value in _made(joint, node) if value in lasting]
    return last_uses(runs, [*lasting, *inputs]), stays


def _main_device(joint: Joint) -> torch.device:
    """The one with the most bytes: the budget is for that."""
    held = Counter({torch.device("cpu"): 0})
    for leaf in tree_leaves([node.meta.get("val") for node in joint.calls]):
        if isinstance(leaf, Tensor):
            held[leaf.device] += nbytes(leaf)
    return max(held, key=held.__getitem__)


def storage_key(tensor: Any) -> int:
    """Equal for tensors that share memory."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError, AttributeError):  # sparse, or an opaque one: memory of its own
        return id(tensor)


def nbytes(tensor: Any) -> int:
    """Of its storage; symbols count as their hints."""
    try:
        return int(optimization_hint(tensor.untyped_storage().nbytes(), fallback=_UNKNOWN_BYTES))
    except (NotImplementedError, RuntimeError, AttributeError):
        return 0
