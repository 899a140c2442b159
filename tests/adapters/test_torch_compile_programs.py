"""Programs that are hard to take apart: compiled with a budget, they leave what eager mode leaves, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the extra 'torch' is not installed")

from _torch_compiled import compiled, left, same  # noqa: E402  # after importorskip
from torch import Tensor, nn  # noqa: E402  # after importorskip

import recompute_torch as rt  # noqa: E402  # after importorskip

pytestmark = pytest.mark.usefixtures("one_thread")


@torch.library.custom_op("recompute_tests::scale", mutates_args=())
def scale(x: Tensor, by: float) -> Tensor:
    return x * by


@torch.library.custom_op("recompute_tests::add_to", mutates_args=("total",))
def add_to(x: Tensor, total: Tensor) -> None:
    total.add_(x)


@torch.library.custom_op("recompute_tests::double_varied", mutates_args=())
def double_varied(x: Tensor) -> Tensor:
    assert x.unique().numel() > 1
    return x * 2


@scale.register_fake
def _scaled(x: Tensor, by: float) -> Tensor:
    return torch.empty_like(x)


@add_to.register_fake
def _added(x: Tensor, total: Tensor) -> None:
    pass


@double_varied.register_fake
def _doubled(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.by = inputs[1]


scale.register_autograd(lambda ctx, gradient: (scale(gradient, ctx.by), None), setup_context=_keep)
double_varied.register_autograd(lambda ctx, gradient: gradient * 2)


class Squared(torch.autograd.Function):
    """Keeps what is no argument of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]  # of any arguments in torch
        ctx.save_for_backward(x)
        ctx.bent = torch.tanh(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]  # of any arguments in torch
        (x,) = ctx.saved_tensors
        return 2 * x * gradient * ctx.bent


class Known(torch.autograd.Function):
    """Has a gradient that is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: Tensor) -> Tensor:  # type: ignore[override]  # of any arguments in torch
        ctx.save_for_backward(gradient)
        return x.sum()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]  # of any arguments in torch
        (gradient,) = ctx.saved_tensors
        return gradient, None


class Program(nn.Module):
    """Six layers around some function."""

    def __init__(self, around: Callable[[Program, Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.two, self.around = nn.Linear(16, 16), nn.Linear(16, 16), around
        self.register_buffer("total", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(6):
            x = torch.tanh(self.around(self, x) + x)
        return x.square().mean()


def added(program: Program, x: Tensor) -> Tensor:
    """Reads a buffer, and a custom operator writes it."""
    found = program.one(x * program.total.clone())
    add_to(found.detach().mean(0), program.total)
    return found


def attended(program: Program, x: Tensor) -> Tensor:
    heads = program.one(x).view(1, 2, -1, 8)
    return nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.2).reshape(x.shape)


def put(program: Program, x: Tensor) -> Tensor:
    return program.one(x).index_put((torch.arange(4),), program.two(x)[:4] * 2)


def chosen(program: Program, x: Tensor) -> Tensor:
    found: Tensor = torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y * 3, (program.one(x),))
    return found


PROGRAMS: dict[str, Callable[[Program, Tensor], Tensor]] = {
    "custom operator": lambda program, x: scale(program.one(x), 1.5),
    "custom operator that writes": added,
    "custom operator that refuses made-up values": lambda program, x: double_varied(program.one(x)),
    "custom function": lambda program, x: Squared.apply(program.one(x)),
    "attention with dropout": attended,
    "complex numbers": lambda program, x: torch.fft.irfft(torch.fft.rfft(program.one(x)).conj(), n=16),
    "index_put": put,
    "condition": chosen,
    "random numbers": lambda program, x: program.one(x) * torch.rand_like(x) + torch.randn(16),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_gives_the_bits_of_eager_mode(name: str) -> None:
    """Less is kept, something runs again, and nothing that is left differs."""

    def begin() -> tuple[Program, Tensor]:
        torch.manual_seed(0)
        return Program(PROGRAMS[name]), torch.randn(128, 16, requires_grad=True)

    module, x = begin()
    expected = left(module, module, x)
    module, x = begin()
    step = compiled(module, 0.8)
    found = left(module, step, x)
    (plan,) = rt.plans(step)
    assert same(expected, found)
    assert plan.saved < plan.saved_plain
    assert plan.overhead > 1


def test_memory_that_a_shape_does_not_tell_is_planned() -> None:
    """What folds patches back leaves a margin behind the picture, which is in memory as long as that is."""
    torch.manual_seed(0)
    first, last, x = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(72, 16), torch.randn(4, 3, 16, 16)

    def loss(x: Tensor) -> Tensor:
        patches = nn.functional.unfold(torch.tanh(first(x)), 3, padding=1)
        return torch.tanh(last(patches.transpose(1, 2))).square().mean()

    step = compiled(loss, 1.0)
    left(last, step, x)
    (plan,) = rt.plans(step)
    assert 0.98 * plan.planned <= plan.peak <= plan.budget + 4


def test_results_that_share_memory_stay_what_they_are() -> None:
    """Views of one result, an input as it is, and numbers, all returned."""
    torch.manual_seed(0)
    layer, x = nn.Linear(16, 16), torch.randn(128, 16, requires_grad=True)

    def several(x: Tensor) -> tuple[Tensor, ...]:
        y = z = torch.tanh(x * 2)
        for _ in range(5):
            z = torch.tanh(layer(z) + z)
        return y, y.view(-1), z[::2], x, z.sum()

    def run(step: Callable[[Tensor], tuple[Tensor, ...]]) -> list[Tensor]:
        layer.zero_grad()
        x.grad = None
        whole, flat, part, _, total = found = step(x)
        (whole.sum() + flat.square().sum() + 2 * part.sum() + total).backward()
        assert whole.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        assert x.grad is not None
        assert layer.weight.grad is not None
        return [*[output.detach() for output in found], x.grad, layer.weight.grad]

    expected = run(several)
    step = compiled(several, 0.85)
    assert same(expected, run(step))
    assert rt.plans(step)[0].overhead > 1


@pytest.mark.parametrize("compiler", ["boxed", "inductor"])
def test_a_gradient_may_be_an_input(compiler: str) -> None:
    """What the backward returns as it is need not be read by an operator of it."""
    x, gradient = torch.ones(8, requires_grad=True), torch.arange(8.0)
    compiled(Known.apply, "1MB", compiler=compiler)(x, gradient).backward()
    assert x.grad is not None
    assert torch.equal(x.grad, gradient)


@torch.compiler.nested_compile_region
def region(x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(x @ weight + x)


def test_a_region_that_is_compiled_once_is_one_operator() -> None:
    """What is around it runs again to fit, and gradients are those of eager mode."""
    torch.manual_seed(0)
    layer, x = nn.Linear(16, 16), torch.randn(128, 16, requires_grad=True)

    def loss(x: Tensor) -> Tensor:
        x = region(region(x, layer.weight), layer.weight)  # torch inlines what is used once
        for _ in range(6):
            x = torch.tanh(layer(x) + x)
        return x.square().mean()

    expected = left(layer, loss, x)
    x.grad = None
    step = compiled(loss, 0.75)
    assert same(expected, left(layer, step, x))
    assert rt.plans(step)[0].overhead > 1
