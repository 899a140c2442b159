"""PyTorch: tensors that share a memory budget.

with rt.budget("5GB"):
    train(model, loader, optimizer)

step = rt.planned(loss_of, "2GB")  # or planned in advance, by torch.compile
"""

from typing import TYPE_CHECKING, Any

try:
    from recompute_torch._adapter import adapter
    from recompute_torch._block import budget, checkpoint, decheckpoint
    from recompute_torch._holders import FloorWarning
    from recompute_torch._least import Least, least
    from recompute_torch._report import Report, Step
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "recompute_torch serves the tensors of PyTorch, which is not installed: pip install '.[torch]' in a checkout",
        name="torch",
    ) from None

if TYPE_CHECKING:
    from recompute_torch._compile.backend import compile, planned, plans
    from recompute_torch._compile.knapsack import KnapsackSolver
    from recompute_torch._compile.report import GraphPlan, Plans

_COMPILED = {
    "compile": "backend",
    "planned": "backend",
    "plans": "backend",
    "GraphPlan": "report",
    "Plans": "report",
    "KnapsackSolver": "knapsack",
}


def __getattr__(name: str) -> Any:
    """What belongs to torch.compile is imported when it is asked for: torch takes a second for it."""
    if name not in _COMPILED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"recompute_torch._compile.{_COMPILED[name]}"), name)


__all__ = [
    "FloorWarning",
    "GraphPlan",
    "KnapsackSolver",
    "Least",
    "Plans",
    "Report",
    "Step",
    "adapter",
    "budget",
    "checkpoint",
    "compile",
    "decheckpoint",
    "least",
    "planned",
    "plans",
]
