"""torch.compile with a budget: a joint graph as a program, priced, planned, and emitted again in the planned order.

`program` reads the graph, `costs` prices its operators, `partition` asks the core's planner and has torch split what
`emit` writes, `meter` watches the first step, `telling` and `report` say what came of it, and `backend` is what torch
calls. For `inductor`, `fusion` reads the graph as kernels, and `mincut` is torch's own split, to compare with.
"""

from recompute_torch._compile import versions  # before anything of torch that is not public

__all__ = ["versions"]
