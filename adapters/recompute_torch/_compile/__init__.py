"""torch.compile with a budget: a joint graph as a program, priced, planned, and emitted again in the planned order.

`program` reads the graph, `costs` prices its operators, `plan` asks the core's planner, `emit` writes the graph anew,
`partition` has torch split it, `meter` watches the first step, `report` tells, and `backend` is what torch calls.
"""

from recompute_torch._compile import versions  # before anything of torch that is not public

__all__ = ["versions"]
