"""The models that `jax_remat.py` measures: layers, a loss on top, and its gradient with and without jax.checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax

POLICIES: Final = (
    "nothing_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "everything_saveable",
)

Layer = Callable[[Any, Any], Any]
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


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
    """What jax.checkpoint may save."""
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
            name: jax.random.normal(own_key, shape) / shape[0] ** 0.5
            for own_key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
        return made | {"one": jnp.ones(width), "two": jnp.ones(width)}

    def norm(x: Any, scale: Any) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale

    def layer(p: Any, x: Any) -> Any:
        parts = jnp.split(norm(x, p["one"]) @ p["qkv"], 3, -1)
        q, k, v = [part.reshape(batch, length, heads, -1).transpose(0, 2, 1, 3) for part in parts]
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
