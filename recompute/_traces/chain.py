"""The uniform training chain: the smallest program on which recomputation has a known optimum."""

from __future__ import annotations

from recompute._traces.program import Program


def chain(n: int) -> Program:
    """n forward and n backward operations, all of cost one and size one; the source takes no memory.

    Forward `f[i] = F(f[i-1])`, where `f[0]` is the source. Backward `b[n] = B(f[n])`, then `b[i] = B(b[i+1], f[i-1])`:
    the gradient of step i needs the step's input. The output is `b[1]`. Values are dropped after their last use, as
    autodiff does: `f[i-1]` after `b[i]`. Raises ValueError unless n is at least 1.
    """
    if n < 1:
        raise ValueError(f"a chain needs at least one forward operation, not {n}")
    program = Program(f"chain of {n}")
    forward = [program.add_source(0)]
    for _ in range(n):
        forward += program.add_call("forward", (forward[-1],), (program.add_storage(1),), 1.0)
    for idle in {forward[n - 1]} - {forward[0]}:
        program.steps.append(("drop", idle))
    program.marks.append((n, "BACKWARD"))
    (gradient,) = program.add_call("backward", (forward[n],), (program.add_storage(1),), 1.0)
    program.steps.append(("drop", forward[n]))
    for i in range(n - 1, 0, -1):
        before = gradient
        (gradient,) = program.add_call("backward", (before, forward[i - 1]), (program.add_storage(1),), 1.0)
        program.steps.append(("drop", before))
        if i > 1:
            program.steps.append(("drop", forward[i - 1]))
    program.outputs = [gradient]
    return program
