"""torch.compile with a budget: a joint graph as a program, priced, planned, and emitted again in the planned order.

`program` reads the graph, `costs` prices its operators, `partition` asks the core's planner and has torch split what
`emit` writes, `remembered` keeps what was planned, `meter` sees what a step really takes, `report` says what came of
it, and `backend` is what torch calls; it compiles by `boxed`, operator by operator, or by `inductor`. For the latter
`fusion` reads the graph as kernels, and `choosing` takes torch's own split or the plan, by what `schedule` says of its
kernels. `ahead` plans without running, and `knapsack` offers the plan to torch's own partitioner.
"""

from recompute_torch._compile import versions  # before anything of torch that is not public

__all__ = ["versions"]
