"""Measures `recompute_jax.remat` against plain jit and the best jax.checkpoint, on the same models in one run.

`python benchmarks/jax_remat.py --into docs/results` writes jax.md and jax.json there; `--models mlp,scan` chooses. For
each model the gradient of a loss is compiled plainly (its temporaries are the baseline), within shares of the baseline,
and with jax.checkpoint: whole, per layer and in blocks of k, under every policy, with both schedulers of XLA on CPU.
Memory is `memory_analysis().temp_size_in_bytes`. All configurations are compiled without LLVM's optimizations for their
memory and FLOPs, which these do not change; those that nothing beats in both are compiled fully and timed, in turns
with the others. FLOPs are XLA's own count, but for scans, whose bodies it counts once: there they are counted from the
equations.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from math import ceil
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from _common import facts, in_turns, markdown, say
from jax import lax

import recompute as rc
from recompute_jax._costs import flops as flops_of
from recompute_jax._jaxpr import flatten
from recompute_jax._remat import remat

MEGA: Final = 1e6
MEMORY: Final = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
LOOKING: Final = {"xla_backend_optimization_level": 0}
POLICIES: Final = (
    "nothing_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "everything_saveable",
)
WITHIN: Final = 1.1  # of the budget
SAME: Final = 2e-6  # of the largest element
SLOWER: Final = 1.02

HEAD: Final = """# JAX under jit: memory, FLOPs and time

`recompute_jax.remat(fn, budget)` against plain `jax.jit(fn)` and the best `jax.checkpoint` that was found, measured by
`python benchmarks/jax_remat.py --into docs/results` in one run. `fn` is the gradient of a loss. Memory is that of XLA's
temporaries (`memory_analysis().temp_size_in_bytes`). Times are the least of a few, taken in turns; they belong to the
machine below. Nothing here was measured on a GPU.

"""

Layer = Callable[[Any, Any], Any]
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


# --- The models -------------------------------------------------------------------------------------------------------


@dataclass
class Model:
    """Layers, a loss on top, and what to take the gradient of."""

    name: str
    what: str
    layers: list[Layer]
    params: Any
    x: Any
    head: Callable[[Any], Any]
    nested: bool = False
    """The loss is the squared gradient of the head's energy with respect to x."""
    shares: tuple[float, ...] = (1.0, 0.75, 0.5, 0.25)
    blocks: tuple[int, ...] = (1, 2, 4)
    policies: tuple[str, ...] = POLICIES
    rivals: int = 3
    """Budgets that are the memory of a configuration of jax.checkpoint: the least ones."""
    scanned: int = 0
    """The one layer is run so many times, in a scan."""

    def function(self, wrap: Wrap | None = None, block: int = 0) -> Callable[..., Any]:
        """The gradient; `wrap` around blocks of so many layers, 0: around the whole loss."""

        def forward(params: Any, x: Any) -> Any:
            if self.scanned:
                return self._scan(params, x, wrap, block)
            size = block or len(self.layers)
            for start in range(0, len(self.layers), size):
                chosen = range(start, min(start + size, len(self.layers)))

                def run(params: Any, x: Any, chosen: range = chosen) -> Any:
                    for at in chosen:
                        x = self.layers[at](params[at], x)
                    return x

                x = (wrap(run) if wrap and block else run)(params, x)
            return self.head(x)

        def loss(params: Any, x: Any) -> Any:
            if self.nested:
                return (jax.grad(forward, argnums=1)(params, x) ** 2).mean()
            return forward(params, x)

        return jax.value_and_grad(wrap(loss) if wrap and not block else loss)

    def _scan(self, params: Any, x: Any, wrap: Wrap | None, block: int) -> Any:
        def step(carry: Any, t: Any) -> Any:
            return self.layers[0](params, (carry, t))

        times = jnp.arange(self.scanned) * 0.01
        if not wrap or not block:
            last, means = lax.scan(step, x, times)
        elif block == 1:
            last, means = lax.scan(wrap(step), x, times)
        else:
            inner = wrap(lambda carry, part: lax.scan(step, carry, part))
            last, means = lax.scan(inner, x, times.reshape(-1, block))
        return self.head(last) + means.sum()


def mlp(count: int = 16, width: int = 512, batch: int = 2048) -> Model:
    keys = jax.random.split(jax.random.key(0), count + 1)
    params = [(jax.random.normal(key, (width, width)) / width**0.5, jnp.zeros(width)) for key in keys[:-1]]
    layer = lambda p, x: jax.nn.gelu(x @ p[0] + p[1])
    x = jax.random.normal(keys[-1], (batch, width))
    return Model("mlp", f"{count}-layer MLP, width {width}, batch {batch}", [layer] * count, params, x, _mean)


def transformer(count: int, width: int = 256, heads: int = 4, length: int = 256, batch: int = 4) -> Model:
    def init(key: Any) -> dict[str, Any]:
        keys = jax.random.split(key, 4)
        wide = 4 * width
        shapes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, wide), "down": (wide, width)}
        made = {
            name: jax.random.normal(each, shape) / shape[0] ** 0.5
            for each, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
        return made | {"one": jnp.ones(width), "two": jnp.ones(width)}

    def norm(x: Any, scale: Any) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale

    def layer(p: Any, x: Any) -> Any:
        parts = jnp.split(norm(x, p["one"]) @ p["qkv"], 3, -1)
        q, k, v = [each.reshape(batch, length, heads, -1).transpose(0, 2, 1, 3) for each in parts]
        scores = q @ k.transpose(0, 1, 3, 2) * (width // heads) ** -0.5
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
        attended = (jax.nn.softmax(scores, -1) @ v).transpose(0, 2, 1, 3).reshape(batch, length, width)
        x = x + attended @ p["out"]
        return x + jax.nn.gelu(norm(x, p["two"]) @ p["up"]) @ p["down"]

    keys = jax.random.split(jax.random.key(0), count + 1)
    x = jax.random.normal(keys[-1], (batch, length, width))
    what = f"{count}-block transformer, width {width}, {heads} heads, {length} tokens, batch {batch}"
    model = Model(f"transformer-{count}", what, [layer] * count, list(map(init, keys[:-1])), x, _mean)
    if count > 12:
        model.blocks, model.policies, model.rivals = (1, 4), ("nothing_saveable", "dots_saveable"), 1
    return model


def resnet(stages: Sequence[int] = (16, 32, 64), per: int = 3, batch: int = 16, size: int = 32) -> Model:
    keys = iter(jax.random.split(jax.random.key(0), 100))

    def convolve(x: Any, kernel: Any, stride: int = 1) -> Any:
        return lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def norm(x: Any, scale: Any) -> Any:
        centred = x - x.mean((0, 1, 2))
        return centred * lax.rsqrt((centred**2).mean((0, 1, 2)) + 1e-5) * scale

    def kernel(side: int, come: int, go: int) -> Any:
        return jax.random.normal(next(keys), (side, side, come, go)) / (side * side * come) ** 0.5

    def layer(p: Any, x: Any) -> Any:
        stride = 2 if "short" in p else 1
        y = jax.nn.relu(norm(convolve(x, p["one"], stride), p["a"]))
        y = norm(convolve(y, p["two"]), p["b"])
        return jax.nn.relu(y + (convolve(x, p["short"], 2) if stride == 2 else x))

    params: list[Any] = [kernel(3, 3, stages[0])]
    layers: list[Layer] = [lambda p, x: convolve(x, p)]
    come = stages[0]
    for stage, go in enumerate(stages):
        for at in range(per):
            p = {"one": kernel(3, come, go), "two": kernel(3, go, go), "a": jnp.ones(go), "b": jnp.ones(go)}
            if stage and not at:
                p["short"] = kernel(1, come, go)
            params.append(p)
            layers.append(layer)
            come = go
    x = jax.random.normal(next(keys), (batch, size, size, 3))
    what = f"ResNet-{2 + 6 * per}, {batch} images of {size} x {size}"
    return Model("resnet", what, layers, params, x, lambda x: (x.mean((1, 2)) ** 2).mean())


def gradient_of_gradient(count: int = 12, width: int = 256, batch: int = 1024) -> Model:
    keys = jax.random.split(jax.random.key(0), count + 1)
    params = [jax.random.normal(key, (width, width)) / width**0.5 for key in keys[:-1]]
    x = jax.random.normal(keys[-1], (batch, width))
    layers: list[Layer] = [lambda p, x: jnp.tanh(x @ p)] * count
    what = f"gradient of the squared gradient of a {count}-layer MLP, width {width}, batch {batch}"
    return Model("grad-of-grad", what, layers, params, x, lambda x: (x**2).sum(), nested=True)


def scan(steps: int = 1000, width: int = 128, batch: int = 32) -> Model:
    one, two = jax.random.split(jax.random.key(0))

    def layer(p: Any, given: Any) -> Any:
        carry, t = given
        new = jnp.tanh(carry @ p + jnp.sin(t))
        return 0.9 * new + 0.1 * carry, new.mean()

    params, x = jax.random.normal(one, (width, width)) / width**0.5, jax.random.normal(two, (batch, width))
    what = f"scan over {steps:,} steps, width {width}, batch {batch}"
    shares, blocks = (1.0, 0.5, 0.25, 0.1), (1, 10, 25, 40, 100)
    return Model("scan", what, [layer], params, x, _mean, shares=shares, blocks=blocks, scanned=steps)


def _mean(x: Any) -> Any:
    return (x**2).mean()


MODELS: Final[dict[str, Callable[[], Model]]] = {
    "mlp": mlp,
    "transformer-6": lambda: transformer(6),
    "transformer-24": lambda: transformer(24),
    "resnet": resnet,
    "grad-of-grad": gradient_of_gradient,
    "scan": scan,
}


# --- The measurements -------------------------------------------------------------------------------------------------


@dataclass
class Found:
    """One way to compile a model."""

    name: str
    temporaries: float
    """MB."""
    gflop: float
    compile_seconds: float = 0.0
    """To trace, lower and compile, without planning."""
    plan_seconds: float = 0.0
    """To plan, and to compile schedules for a look at their memory."""
    milliseconds: float | None = None
    budget: float | None = None
    """MB."""
    difference: float | None = None
    """From plain jit, of the largest element."""


@dataclass
class Result:
    """What was found for one model."""

    model: str
    what: str
    equations: int
    plain: Found
    planned: list[Found] = field(default_factory=list)
    refused: list[tuple[float, str]] = field(default_factory=list)
    checkpoints: list[Found] = field(default_factory=list)
    """Those that no other beats in memory and FLOPs."""
    tried: int = 0


def configurations(model: Model) -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
    """The ways to use jax.checkpoint."""
    for options in ({}, MEMORY):
        suffix = ", memory scheduler" if options else ""
        yield f"plain{suffix}", model.function(), options
        for block in (0, *model.blocks):
            name = "whole" if not block else "each layer" if block == 1 else f"blocks of {block}"
            for policy in model.policies:
                wrap = lambda f, policy=policy: jax.checkpoint(f, policy=getattr(jax.checkpoint_policies, policy))
                yield f"{name}, {policy}{suffix}", model.function(wrap, block), options


def temporaries(compiled: Any) -> float:
    return float(compiled.memory_analysis().temp_size_in_bytes) / MEGA


def gflop(model: Model, function: Callable[..., Any], compiled: Any, args: Any) -> float:
    if model.scanned:
        flat = flatten(jax.make_jaxpr(function)(*args), inline_custom=True)
        return sum(map(flops_of, flat.equations)) / 1e9
    return float(compiled.cost_analysis()["flops"]) / 1e9


def front(found: Sequence[Found]) -> list[Found]:
    """Those with fewer FLOPs than all that need no more memory."""
    best: list[Found] = []
    for each in sorted(found, key=lambda each: (each.temporaries, each.gflop)):
        if not best or each.gflop < best[-1].gflop * 0.9995:
            best.append(each)
    return best


def compile_fully(function: Any, args: Any, options: dict[str, Any]) -> tuple[Any, float]:
    jax.clear_caches()
    began = perf_counter()
    jitted = function if hasattr(function, "lower") else jax.jit(function, compiler_options=options)
    compiled = jitted.lower(*args).compile()
    return compiled, perf_counter() - began


def measure(model: Model, times: int, time_limit: float) -> Result:
    args = model.params, model.x
    plain = model.function()
    runs: dict[str, Any] = {}
    compiled, seconds = compile_fully(plain, args, {})
    found = Found("plain", temporaries(compiled), gflop(model, plain, compiled, args), seconds)
    equations = len(flatten(jax.make_jaxpr(plain)(*args), inline_custom=False).equations)
    result = Result(model.name, model.what, equations, found)
    expected = jax.tree.leaves(compiled(*args))
    runs["plain"] = compiled
    say(f"{model.name}: {equations} equations, plain {found.temporaries:.1f} MB, compiled in {seconds:.1f} s")

    kept: dict[str, tuple[Any, dict[str, Any]]] = {}
    tried: list[Found] = []
    for name, function, options in configurations(model):
        looked = jax.jit(function, compiler_options={**options, **LOOKING}).lower(*args).compile()
        tried.append(Found(name, temporaries(looked), gflop(model, function, looked, args)))
        kept[name] = function, options
    result.tried = len(tried)
    result.checkpoints = front(tried)
    for each in result.checkpoints:
        function, options = kept[each.name]
        runs[each.name], each.compile_seconds = compile_fully(function, args, options)
        say(f"  {each.name}: {each.temporaries:.1f} MB, {each.gflop:.2f} GFLOP")

    asked: list[tuple[str, Any]] = [(f"{share:.0%}", share) for share in model.shares]
    asked += [
        (f"as {each.name}", ceil(each.temporaries * MEGA))
        for each in result.checkpoints[: model.rivals]
        if each.temporaries < 0.99 * found.temporaries
    ]
    for name, budget in asked:
        function = remat(plain, budget, time_limit=time_limit)
        megabytes = budget * found.temporaries if isinstance(budget, float) else budget / MEGA
        try:
            plan = function.plan(*args)
        except rc.BudgetError as error:
            result.refused.append((megabytes, str(error)))
            say(f"  {name}: {error}")
            continue
        began = perf_counter()
        compiled = function.lower(*args).compile()
        seconds = perf_counter() - began
        counted = (plan.flops + plan.extra_flops) / 1e9 if model.scanned else gflop(model, plain, compiled, args)
        each = Found(name, temporaries(compiled), counted, seconds, plan.seconds, None, megabytes)
        made = jax.tree.leaves(compiled(*args))
        each.difference = max(map(_difference, expected, made))
        result.planned.append(each)
        runs[name] = compiled
        say(
            f"  {name}: {each.temporaries:.1f} of {megabytes:.1f} MB, {counted:.2f} GFLOP, plan in {plan.seconds:.0f} s"
        )

    seconds_of = in_turns({name: _timed(run, args) for name, run in runs.items()}, times)
    for each in (found, *result.checkpoints, *result.planned):
        each.milliseconds = min(seconds_of[each.name]) * 1e3
    return result


def _timed(run: Any, args: Any) -> Callable[[], float]:
    def measure() -> float:
        began = perf_counter()
        jax.block_until_ready(run(*args))
        return perf_counter() - began

    return measure


def _difference(expected: Any, made: Any) -> float:
    scale = float(np.abs(np.asarray(expected)).max())
    return float(np.abs(np.asarray(expected) - np.asarray(made)).max()) / scale if scale else 0.0


# --- The page ---------------------------------------------------------------------------------------------------------


def best_within(result: Result, megabytes: float) -> Found | None:
    """The fastest checkpoint configuration that fits."""
    fitting = [each for each in result.checkpoints if each.temporaries <= megabytes * 1.0001]
    return min(fitting, key=lambda each: each.milliseconds or 0.0, default=None)


def page(results: Sequence[Result], about: dict[str, str]) -> str:
    lines = [HEAD]
    lines += goals(results)
    for result in results:
        lines.append(f"\n## {result.what[0].upper()}{result.what[1:]}\n")
        plain = result.plain
        lines.append(
            f"{result.equations:,} equations; plain jit: {plain.temporaries:.1f} MB, {plain.gflop:.2f} GFLOP, "
            f"{plain.milliseconds:.1f} ms, compiled in {plain.compile_seconds:.1f} s. {result.tried} configurations of "
            "jax.checkpoint were compiled; the best that fits is the fastest of those that need no more memory than "
            "the budget.\n"
        )
        rows = []
        for each in result.planned:
            other = best_within(result, each.budget or 0.0)
            rows.append(
                (
                    each.name,
                    f"{each.budget:.1f}",
                    f"{each.temporaries:.1f}",
                    f"{each.gflop:.2f}",
                    f"{each.milliseconds:.1f}",
                    f"{each.plan_seconds:.1f} + {each.compile_seconds:.1f}",
                    f"{each.difference:.1e}",
                    "none" if other is None else f"{other.temporaries:.1f}",
                    "" if other is None else f"{other.gflop:.2f}",
                    "" if other is None else f"{other.milliseconds:.1f}",
                    "" if other is None else other.name,
                )
            )
        header = "budget MB compiled GFLOP ms plan+compile_s difference best_MB best_GFLOP best_ms which".split()
        lines.append(markdown(("", *[each.replace("_", " ") for each in header]), rows))
        lines += [f"\nRefused, {megabytes:.1f} MB: {error}\n" for megabytes, error in result.refused]
    lines.append("\n## Machine\n")
    lines += [f"* {name}: {value}" for name, value in about.items()]
    return "\n".join(lines) + "\n"


def goals(results: Sequence[Result]) -> list[str]:
    """Each goal with what met it and what did not."""
    within, missed, leaner, not_leaner, alone = 0, [], 0, [], []
    worst, slowest, compiles, plans = 0.0, [], [], []
    for result in results:
        for each in result.planned:
            assert each.budget is not None
            assert each.milliseconds is not None
            if each.temporaries <= WITHIN * each.budget:
                within += 1
            else:
                missed.append(f"{result.model} at {each.name}")
            worst = max(worst, each.difference or 0.0)
            if each.name == "100%":
                slowest.append((each.milliseconds / (result.plain.milliseconds or 1.0), result.model))
                continue
            compiles.append((each.compile_seconds - 2 * result.plain.compile_seconds, result.model))
            plans.append(each.plan_seconds)
            other = best_within(result, each.budget)
            if other is None:
                alone.append(f"{result.model} at {each.name}")
            elif each.gflop <= other.gflop * 1.0001 and each.milliseconds <= (other.milliseconds or 0.0):
                leaner += 1
            else:
                not_leaner.append(
                    f"{result.model} at {each.name}: {each.gflop / other.gflop:.3f} of the FLOPs, "
                    f"{each.milliseconds / (other.milliseconds or 1.0):.2f} of the time of {other.name}"
                )
        missed += [f"{result.model} at {megabytes:.1f} MB (refused)" for megabytes, _ in result.refused]
    ratio, which = max(slowest, default=(0.0, ""))
    longest, long = max(compiles, default=(0.0, ""))
    return [
        "## Goals\n",
        f"* Compiled temporaries at most {WITHIN} times the budget: {within} of {within + len(missed)} budgets."
        + (f" Missed: {'; '.join(missed)}." if missed else ""),
        f"* No more FLOPs and no more time than the best checkpoint that fits: {leaner} of {leaner + len(not_leaner)}."
        + (f" Not: {'; '.join(not_leaner)}." if not_leaner else ""),
        f"* Budgets in which no configuration of jax.checkpoint fits: {len(alone)} ({'; '.join(alone) or 'none'}).",
        f"* Largest difference from plain jit: {worst:.1e} of the largest element; the goal is {SAME:.0e}.",
        f"* With 100 %, the slowest is {ratio:.3f} times plain jit ({which}); the goal is {SLOWER}. The program is the "
        "same, so what differs is noise.",
        "* To trace, lower and compile the planned function took at most twice what the plain one took plus "
        f"{max(longest, 0.0):.1f} s ({long}). Planning, and compiling schedules for a look at their memory, comes "
        f"before, once a signature: up to {max(plans, default=0.0):.0f} s.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--into", type=Path, help="a directory for jax.md and jax.json")
    parser.add_argument("--models", default=",".join(MODELS), help="names, with commas between them")
    parser.add_argument("--times", type=int, default=5, help="repetitions")
    parser.add_argument("--time-limit", type=float, default=8.0, help="seconds of planning for each budget")
    options = parser.parse_args()
    about = facts() | {"jax": version("jax"), "jaxlib": version("jaxlib"), "device": str(jax.devices()[0])}
    results: list[Result] = []
    for name in options.models.split(","):
        results.append(measure(MODELS[name](), options.times, options.time_limit))
        text = page(results, about)
        if options.into:
            options.into.mkdir(parents=True, exist_ok=True)
            (options.into / "jax.md").write_text(text, encoding="utf-8")
            content = {"facts": about, "results": [asdict(each) for each in results]}
            (options.into / "jax.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
