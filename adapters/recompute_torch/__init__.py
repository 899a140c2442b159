"""PyTorch: tensors that share a memory budget.

with rt.budget("5GB"):
    train(model, loader, optimizer)
"""

try:
    from recompute_torch._adapter import TorchAdapter, adapter
    from recompute_torch._block import budget, checkpoint, decheckpoint
    from recompute_torch._floor import FloorWarning
    from recompute_torch._holders import Held, Parts
    from recompute_torch._least import Least, least
    from recompute_torch._report import Report, Step
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "recompute_torch serves the tensors of PyTorch, which is not installed: pip install 'recompute-cache[torch]'",
        name="torch",
    ) from None

__all__ = [
    "FloorWarning",
    "Held",
    "Least",
    "Parts",
    "Report",
    "Step",
    "TorchAdapter",
    "adapter",
    "budget",
    "checkpoint",
    "decheckpoint",
    "least",
]
