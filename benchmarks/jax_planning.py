"""What planning costs: processor seconds of `remat(fn, of_peak=share).plan(...)` beside those of XLA's compile of `fn`.

`python benchmarks/jax_planning.py --into docs/results` writes jax-planning.md there; `--programs chain` chooses. `fn`
is `value_and_grad` of a loss. Planning is everything before the compilation of the planned function: tracing, planning,
and compilations to see how much memory XLA needs. The plain function is traced, lowered and compiled with the same
scheduler. Equations include those of inner functions. Overhead is the planner's: the cost of all runs divided by that
of each once.
"""

from __future__ import annotations

from collections.abc import Callable
from time import process_time
from typing import Any, Final

import jax
import jax.numpy as jnp
from _common import arguments, facts, markdown, page, say, write
from jax import lax

import recompute as rc
from recompute_jax import remat
from recompute_jax._program.segments import size_of

MEMORY: Final[dict[str, Any]] = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
HEADER: Final = (
    "program | equations | plain s | share | budget kB | compiled kB | overhead | compilations | planning s | "
    "planning / plain"
)


def normal(count: int, *shape: int) -> Any:
    return jax.random.normal(jax.random.key(count), shape) / shape[-1] ** 0.5


def chain(length: int) -> tuple[Any, Any, Any]:
    """Narrow layers of `tanh(x @ w)`."""

    def loss(weights: Any, x: Any) -> Any:
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return (x**2).mean()

    return loss, [normal(at, 32, 32) for at in range(length)], jnp.ones((256, 32))


def cnn(length: int) -> tuple[Any, Any, Any]:
    """Residual layers of a convolution and a normalization."""

    def loss(weights: Any, x: Any) -> Any:
        for weight in weights:
            y = lax.conv_general_dilated(x, weight, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            y = y - y.mean((0, 1, 2))
            x = x + jax.nn.relu(y * lax.rsqrt((y**2).mean((0, 1, 2)) + 1e-5))
        return (x**2).mean()

    return loss, [normal(at, 3, 3, 16, 16) / 3 for at in range(length)], jnp.ones((8, 32, 32, 16))


def block(x: Any, weights: Any) -> Any:
    query, key, value, out, up, down = weights

    def normalized(x: Any) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)

    rows, length, width = x.shape
    heads = [(normalized(x) @ weight).reshape(rows, length, 4, width // 4) for weight in (query, key, value)]
    scores = jnp.einsum("bthd,bshd->bhts", heads[0], heads[1]) / 4
    scores = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9))
    x = x + jnp.einsum("bhts,bshd->bthd", scores, heads[2]).reshape(x.shape) @ out
    return x + jax.nn.gelu(normalized(x) @ up) @ down


def weights_of_blocks(length: int) -> list[list[Any]]:
    shapes = [(64, 64)] * 4 + [(64, 256), (256, 64)]
    return [[normal(at, *shape) for shape in shapes] for at in range(length)]


def transformer(length: int) -> tuple[Any, Any, Any]:
    """Blocks of attention and of a network, written out."""

    def loss(weights: Any, x: Any) -> Any:
        for weight in weights:
            x = block(x, weight)
        return (x**2).mean()

    return loss, weights_of_blocks(length), jnp.ones((8, 32, 64))


def scanned(length: int) -> tuple[Any, Any, Any]:
    """The same blocks in a scan."""

    def loss(weights: Any, x: Any) -> Any:
        return (lax.scan(lambda x, block_weights: (block(x, block_weights), None), x, weights)[0] ** 2).mean()

    return loss, jax.tree.map(lambda *arrays: jnp.stack(arrays), *weights_of_blocks(length)), jnp.ones((8, 32, 64))


PROGRAMS: Final[dict[str, tuple[Callable[[int], tuple[Any, Any, Any]], int, tuple[float, ...]]]] = {
    "chain": (chain, 40, (0.5, 0.2)),
    "cnn": (cnn, 30, (0.5, 0.25)),
    "transformer": (transformer, 12, (0.5, 0.25)),
    "scanned transformer": (scanned, 16, (0.5, 0.25)),
    "long chain": (chain, 1_000, (0.5, 0.2)),
}


_clear: Final[Callable[[], None]] = jax.clear_caches  # which has no types


def measure(name: str) -> list[list[str]]:
    """One line for each share."""
    make, length, shares = PROGRAMS[name]
    loss, weights, x = make(length)
    fn = jax.value_and_grad(loss)
    equations = size_of(jax.make_jaxpr(fn)(weights, x).jaxpr)
    _clear()
    began = process_time()
    jax.jit(fn).lower(weights, x).compile(compiler_options=MEMORY)
    plain = process_time() - began
    lines = []
    for share in shares:
        _clear()
        planned = remat(fn, of_peak=share)
        began = process_time()
        try:
            plan = planned.plan(weights, x)
            sizes = [f"{plan.budget / 1e3:.0f}", f"{plan.compiled / 1e3:.0f}"]
            found = [*sizes, f"{plan.overhead:.3f}", str(len(plan.trials))]
        except rc.BudgetError as error:
            say(f"  {error}")
            found = ["", "none fits", "", ""]
        took = process_time() - began
        start = [f"{name}, {length} layers", f"{equations:,}", f"{plain:.2f}", f"{share:.0%}"]
        lines.append([*start, *found, f"{took:.2f}", f"{took / plain:.1f}"])
        say("  " + " | ".join(lines[-1]))
    return lines


def main() -> None:
    parser = arguments(__doc__.split("\n", 1)[0], into=None)
    parser.add_argument("--programs", default=",".join(PROGRAMS), help="names, with commas between them")
    options = parser.parse_args()
    jax.jit(jnp.sin).lower(1.0).compile()
    machine = facts("jax")
    lines: list[list[str]] = []
    for name in options.programs.split(","):
        say(name)
        lines += measure(name)
        text = page("JAX: what planning costs", __doc__, markdown(HEADER, lines), machine=machine)
        write(options.into, "jax-planning", text)
    print(text)


if __name__ == "__main__":
    main()
