"""Small programs as the users of other libraries write them, with arguments and the shares that are asked for."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Program:
    """A function of arrays, and its arguments."""

    name: str
    what: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    shares: tuple[float, ...] = (0.5,)
    options: dict[str, Any] = field(default_factory=dict)


def _keys(count: int) -> Any:
    return jax.random.split(jax.random.key(0), count)


def _images(count: int = 64, side: int = 28, channels: int = 1) -> tuple[Any, Any]:
    one, two = _keys(2)
    return jax.random.normal(one, (count, side, side, channels)), jax.random.randint(two, (count,), 0, 10)


def _linen() -> tuple[Any, Any, Any]:
    import flax.linen as nn
    import optax

    class Block(nn.Module):
        features: int

        @nn.compact
        def __call__(self, x: Any) -> Any:
            y = nn.Conv(self.features, (3, 3), use_bias=False)(x)
            y = nn.relu(nn.GroupNorm(8)(y))
            y = nn.GroupNorm(8)(nn.Conv(self.features, (3, 3), use_bias=False)(y))
            return nn.relu(x + y)

    class CNN(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for features in (32, 64):
                x = nn.Conv(features, (3, 3), (2, 2))(x)
                for _ in range(3):
                    x = Block(features)(x)
            return nn.Dense(10)(x.mean((1, 2)))

    from flax.training import train_state

    model = CNN()
    images, labels = _images()
    params = model.init(jax.random.key(0), images)["params"]
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))

    def step(state: Any, images: Any, labels: Any) -> Any:
        def loss(params: Any) -> Any:
            logits = state.apply_fn({"params": params}, images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        value, slopes = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=slopes), value

    return step, state, (images, labels)


def linen() -> Program:
    step, state, batch = _linen()
    return Program(
        "linen resnet", "residual blocks of flax.linen, a whole step with TrainState and adamw", step, (state, *batch)
    )


def linen_donated() -> Program:
    step, state, batch = _linen()
    what = "the same, donating the state: XLA cannot put gradients into the memory of results, so it needs more"
    return Program("linen resnet (donated)", what, step, (state, *batch), (0.7,), {"donate_argnums": 0})


def orbax() -> Program:
    import orbax.checkpoint as ocp

    step, state, batch = _linen()
    with tempfile.TemporaryDirectory() as directory, ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(f"{directory}/state", state)
        checkpointer.wait_until_finished()
        state = checkpointer.restore(f"{directory}/state", state)
    return Program(
        "orbax", "the step of linen resnet, on a state that was saved and restored", step, (state, *batch), (0.6,)
    )


def nnx_transformer() -> Program:
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, width: int, rngs: Any) -> None:
            self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
            self.attention = nnx.MultiHeadAttention(4, width, rngs=rngs, decode=False)
            self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            x = x + self.attention(self.norms[0](x), mask=nnx.make_causal_mask(x[..., 0]))
            return x + self.down(nnx.gelu(self.up(self.norms[1](x))))

    class Model(nnx.Module):
        def __init__(self, width: int, rngs: Any) -> None:
            self.embed = nnx.Embed(128, width, rngs=rngs)
            self.blocks = nnx.List([Block(width, rngs) for _ in range(3)])
            self.head = nnx.Linear(width, 128, rngs=rngs)

        def __call__(self, tokens: Any) -> Any:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    graph, state = nnx.split(Model(64, nnx.Rngs(0)))
    tokens = jax.random.randint(jax.random.key(1), (8, 64), 0, 128)

    def loss(state: Any, tokens: Any) -> Any:
        logits = nnx.merge(graph, state)(tokens)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], -1).mean()

    what = "a decoder of flax.nnx (MultiHeadAttention, LayerNorm, Embed), the gradient of its loss"
    return Program("nnx transformer", what, jax.grad(loss), (nnx.to_pure_dict(state), tokens))


def nnx_norm() -> Program:
    import optax
    from flax import nnx

    class CNN(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.convolutions = nnx.List([nnx.Conv(one, two, (3, 3), rngs=rngs) for one, two in ((1, 32), (32, 64))])
            self.norm = nnx.BatchNorm(32, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)
            self.linear = nnx.Linear(7 * 7 * 64, 10, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            x = nnx.avg_pool(nnx.relu(self.norm(self.dropout(self.convolutions[0](x)))), (2, 2), (2, 2))
            x = nnx.avg_pool(nnx.relu(self.convolutions[1](x)), (2, 2), (2, 2))
            return self.linear(x.reshape(x.shape[0], -1))

    model = CNN(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))

    def step(state: Any, images: Any, labels: Any) -> Any:
        model, optimizer = nnx.merge(graph, state)

        def loss(model: Any) -> Any:
            return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()

        value, slopes = nnx.value_and_grad(loss)(model)
        optimizer.update(model, slopes)
        return nnx.state((model, optimizer)), value

    what = "the CNN of flax.nnx's MNIST tutorial with BatchNorm, Dropout and its optimizer, a whole step"
    return Program("nnx cnn", what, step, (state, *_images()), (0.7,))


def _perceptron(width: int = 128, depth: int = 8) -> tuple[Any, Any, Any]:
    keys = _keys(depth + 1)
    params = [jax.random.normal(key, (width, width)) / width**0.5 for key in keys[:depth]]
    x = jax.random.normal(keys[-1], (512, width))

    def loss(params: Any, x: Any) -> Any:
        y = x
        for param in params:
            y = jnp.tanh(y @ param) + 0.1 * y
        return ((y - jnp.roll(x, 1, 0)) ** 2).mean()

    return loss, params, x


def multi_steps() -> Program:
    import optax

    loss, params, x = _perceptron()
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-3, 100)))
    optimizer = optax.MultiSteps(chain, 2)

    def step(params: Any, state: Any, x: Any) -> Any:
        value, slopes = jax.value_and_grad(loss)(params, x)
        updates, state = optimizer.update(slopes, state, params)
        return optax.apply_updates(params, updates), state, value

    what = "optax.MultiSteps of clipping, a schedule and adamw (conditionals and counters)"
    return Program("optax MultiSteps", what, step, (params, optimizer.init(params), x))


def lbfgs() -> Program:
    import optax

    loss, params, x = _perceptron(64, 4)
    optimizer = optax.lbfgs(memory_size=4, linesearch=optax.scale_by_zoom_linesearch(6))

    def step(params: Any, state: Any, x: Any) -> Any:
        of = lambda params: loss(params, x)
        value, slopes = optax.value_and_grad_from_state(of)(params, state=state)
        updates, state = optimizer.update(slopes, state, params, value=value, grad=slopes, value_fn=of)
        return optax.apply_updates(params, updates), value

    what = "a step of optax.lbfgs with its line search (a while_loop around gradients)"
    return Program("optax lbfgs", what, step, (params, optimizer.init(params), x), (0.7,))


def equinox_recurrent() -> Program:
    import equinox as eqx

    one, two, three = _keys(3)
    cell, head = eqx.nn.GRUCell(16, 64, key=one), eqx.nn.Linear(64, 1, key=two)
    x = jax.random.normal(three, (32, 64, 16))

    def loss(model: Any, x: Any) -> Any:
        cell, head = model

        def run(row: Any) -> Any:
            last, _ = jax.lax.scan(lambda h, u: (cell(u, h), None), jnp.zeros(64), row)
            return head(last)

        return (jax.vmap(run)(x) ** 2).mean()

    def gradient(model: Any, x: Any) -> Any:
        return eqx.filter_value_and_grad(loss)(model, x)

    what = "a GRU of equinox over 64 steps, filter_value_and_grad of modules"
    return Program("equinox gru", what, gradient, ((cell, head), x), (0.3,))


def _ode(name: str, what: str, adjoint: Any, shares: tuple[float, ...]) -> Program:
    import diffrax
    import equinox as eqx

    field = eqx.nn.MLP(8, 8, 64, 2, activation=jnp.tanh, key=jax.random.key(0))
    params, static = eqx.partition(field, eqx.is_array)
    y = jax.random.normal(jax.random.key(1), (64, 8))

    def loss(params: Any, y: Any) -> Any:
        solve = lambda y: (
            diffrax.diffeqsolve(
                diffrax.ODETerm(lambda t, y, params: eqx.combine(params, static)(y)),
                diffrax.Tsit5(),
                0.0,
                1.0,
                0.1,
                y,
                params,
                stepsize_controller=diffrax.PIDController(1e-3, 1e-5),
                adjoint=adjoint(diffrax),
                max_steps=32,
            ).ys
        )
        return (jax.vmap(solve)(y) ** 2).mean()

    return Program(name, what, jax.grad(loss), (params, y), shares)


def diffrax_checkpoints() -> Program:
    what = "a neural ODE of diffrax, RecursiveCheckpointAdjoint"
    return _ode("diffrax recursive", what, lambda diffrax: diffrax.RecursiveCheckpointAdjoint(), (0.8,))


def diffrax_direct() -> Program:
    what = "the same with DirectAdjoint"
    return _ode("diffrax direct", what, lambda diffrax: diffrax.DirectAdjoint(), (0.6,))


def diffrax_backsolve() -> Program:
    what = "the same with BacksolveAdjoint"
    return _ode("diffrax backsolve", what, lambda diffrax: diffrax.BacksolveAdjoint(), (0.8,))


def numpyro_density() -> Program:
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer.util import log_density

    def model(x: Any, y: Any) -> None:
        h = x
        for at, (one, two) in enumerate(((16, 64), (64, 64), (64, 1))):
            w = numpyro.sample(f"w{at}", dist.Normal(0, 1).expand((one, two)).to_event(2))
            h = h @ w if at == 2 else jnp.tanh(h @ w / 8)
        numpyro.sample("y", dist.Normal(h[:, 0], 0.1), obs=y)

    keys = _keys(5)
    params = {f"w{at}": jax.random.normal(keys[at], shape) for at, shape in enumerate(((16, 64), (64, 64), (64, 1)))}
    x, y = jax.random.normal(keys[3], (2048, 16)), jax.random.normal(keys[4], (2048,))
    fn = jax.value_and_grad(lambda params, x, y: log_density(model, (x, y), {}, params)[0])
    what = "the log density of a Bayesian network in numpyro, and its gradient"
    return Program("numpyro", what, fn, (params, x, y))


def blackjax_hmc() -> Program:
    import blackjax

    one, two = _keys(2)
    x, y = jax.random.normal(one, (4096, 32)), jax.random.bernoulli(two, 0.5, (4096,)).astype(jnp.float32)

    def step(state: Any, key: Any, x: Any, y: Any) -> Any:
        def density(w: Any) -> Any:
            h = jnp.tanh(x @ w["in"])
            return -(w["in"] ** 2).sum() - jnp.logaddexp(0, (1 - 2 * y) * (h @ w["out"])).sum()

        return blackjax.hmc.build_kernel()(key, state, density, 1e-3, jnp.ones(32 * 16 + 16), 4)

    start = {"in": jnp.zeros((32, 16)) + 0.01, "out": jnp.ones(16) * 0.1}
    density = lambda w: -(w["in"] ** 2).sum() - jnp.logaddexp(0, (1 - 2 * y) * (jnp.tanh(x @ w["in"]) @ w["out"])).sum()
    state = blackjax.hmc.init(start, density)
    return Program(
        "blackjax hmc", "a step of HMC in blackjax, four leapfrog steps", step, (state, jax.random.key(2), x, y), (0.8,)
    )


def haiku() -> Program:
    import haiku as hk

    def forward(x: Any) -> Any:
        for features in (32, 32, 64):
            x = hk.Conv2D(features, 3)(x)
            x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(x, True))
        return hk.Linear(10)(x.mean((1, 2)))

    model = hk.transform_with_state(forward)
    images, labels = _images(32, 16, 3)
    params, state = model.init(jax.random.key(0), images)

    def loss(params: Any, state: Any, images: Any, labels: Any) -> Any:
        logits, state = model.apply(params, state, None, images)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean(), state

    what = "a CNN of haiku with BatchNorm, value_and_grad with its state"
    return Program("haiku", what, jax.value_and_grad(loss, has_aux=True), (params, state, images, labels))


PROGRAMS: Final[dict[str, Callable[[], Program]]] = {
    "linen resnet": linen,
    "linen resnet (donated)": linen_donated,
    "nnx transformer": nnx_transformer,
    "nnx cnn": nnx_norm,
    "optax MultiSteps": multi_steps,
    "optax lbfgs": lbfgs,
    "equinox gru": equinox_recurrent,
    "diffrax recursive": diffrax_checkpoints,
    "diffrax direct": diffrax_direct,
    "diffrax backsolve": diffrax_backsolve,
    "numpyro": numpyro_density,
    "blackjax hmc": blackjax_hmc,
    "haiku": haiku,
    "orbax": orbax,
}
