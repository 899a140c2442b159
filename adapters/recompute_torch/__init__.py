"""PyTorch: tensors that share a memory budget.

with rt.budget("5GB"):
    train(model, loader, optimizer)
"""

from recompute_torch._adapter import TorchAdapter, adapter
from recompute_torch._block import budget, checkpoint, decheckpoint

__all__ = ["TorchAdapter", "adapter", "budget", "checkpoint", "decheckpoint"]
