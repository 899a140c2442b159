"""What training scripts do besides training: the same inside of a block that evicts after each operator, bit by bit."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the extra 'torch' is not installed")
np = pytest.importorskip("numpy", reason="the extra 'numpy' is not installed")

from _torch_operators import Evicting  # noqa: E402  # after importorskip
from _torch_scripts import alike, check, left_in, network, run, train  # noqa: E402  # after importorskip
from torch import nn  # noqa: E402  # after importorskip
from torch.nn import functional  # noqa: E402  # after importorskip
from torch.utils.checkpoint import checkpoint  # noqa: E402  # after importorskip
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402  # after importorskip

import recompute_torch as rt  # noqa: E402  # after importorskip

pytestmark = pytest.mark.usefixtures("path")

optim = torch.optim

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD foreach": lambda these: optim.SGD(these, 0.1, momentum=0.9, nesterov=True, foreach=True),
    "SGD fused": lambda these: optim.SGD(these, 0.1, momentum=0.9, fused=True),
    "Adam foreach": lambda these: optim.Adam(these, foreach=True),
    "AdamW fused": lambda these: optim.AdamW(these, amsgrad=True, fused=True),
    "Adam": lambda these: optim.Adam(these, foreach=False),
    "Adagrad fused": lambda these: optim.Adagrad(these, fused=True),
    "RMSprop": lambda these: optim.RMSprop(these, centered=True, momentum=0.5),
    "NAdam": lambda these: optim.NAdam(these),
    "RAdam": lambda these: optim.RAdam(these),
    "Rprop": lambda these: optim.Rprop(these),
    "Adamax": lambda these: optim.Adamax(these),
    "Adadelta": lambda these: optim.Adadelta(these),
    "ASGD": lambda these: optim.ASGD(these),
    "Adafactor": lambda these: optim.Adafactor(these),
    "Muon": lambda these: optim.Muon([parameter for parameter in these if parameter.ndim == 2]),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    """Every optimizer of torch takes the same steps, and remembers the same."""

    def script() -> Sequence[Any]:
        module = network()
        optimizer = OPTIMIZERS[name](module.parameters())
        losses = train(module, optimizer)
        memory = [value for state in optimizer.state.values() for value in state.values()]
        return [*losses, *left_in(module), *memory]

    check(script, 20)


def lbfgs() -> Sequence[Any]:
    """It calls the model again and again inside of a step."""
    module, x = network(0.0), torch.randn(4, 8)
    optimizer = optim.LBFGS(module.parameters(), max_iter=3)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = module(x).square().mean()
        loss.backward()
        return loss

    return [optimizer.step(closure), *left_in(module)]


def sparse_gradients() -> Sequence[Any]:
    """An embedding whose gradient is a sparse tensor."""
    table = nn.Embedding(20, 4, sparse=True)
    optimizer = optim.SparseAdam(table.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        table(torch.randint(20, (5,))).square().sum().backward()
        optimizer.step()
    return [table.weight, table.weight.grad]


def scaled() -> Sequence[Any]:
    """Autocast and a scaler of gradients, one of which overflows."""
    module = network()
    optimizer, scaler = optim.SGD(module.parameters(), 0.1), torch.amp.GradScaler("cpu")
    found: list[Any] = []
    for factor in (1.0, 1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = module(torch.randn(4, 8)).float().square().mean() * factor
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        found.append(nn.utils.clip_grad_norm_(module.parameters(), 1.0))
        scaler.step(optimizer)
        scaler.update()
    return [*found, scaler.get_scale(), *left_in(module)]


def accumulated() -> Sequence[Any]:
    """Gradients of several batches, clipped; a schedule of rates."""
    module = network()
    optimizer = optim.AdamW(module.parameters())
    schedule = optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4)
    for number in range(6):
        module(torch.randn(4, 8)).square().mean().div(3).backward()
        if number % 3 == 2:
            nn.utils.clip_grad_value_(module.parameters(), 0.01)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=number < 3)
    return left_in(module)


def without_gradients() -> Sequence[Any]:
    """no_grad and inference_mode, in training and in evaluation, and writes in both."""
    module, found = network(), []
    with torch.no_grad():
        found.append(module(torch.randn(4, 8)).add_(1) * 2)
    with torch.inference_mode():
        y = module(torch.randn(4, 8))
        y[2:] += 1
        module.eval()
        found += [y, module(torch.randn(4, 8)).reshape(-1).contiguous()]
    return [*found, *left_in(module)]


def transforms() -> Sequence[Any]:
    """grad, vmap, hessian and others of torch.func, of samples one by one and with random numbers."""
    func = torch.func
    matrix, x = torch.randn(3, 3), torch.randn(3)

    def f(x: Any) -> Any:
        return (matrix @ x).sin().prod() + x.pow(3).sum()

    module = network(0.0).eval()
    weights, buffers = dict(module.named_parameters()), dict(module.named_buffers())

    def loss(weights: Any, x: Any) -> Any:
        return func.functional_call(module, (weights, buffers), (x[None],)).square().sum()

    by_sample = func.vmap(func.grad(loss), (None, 0))(weights, torch.randn(4, 8))
    dropped = func.vmap(functional.dropout, randomness="different")(torch.randn(4, 3))
    forward = func.jvp(f, (x,), (x,))[1]
    return [func.grad(f)(x), func.hessian(f)(x), func.jacrev(func.jacfwd(f))(x), forward, dropped, *by_sample.values()]


def gradients_of_gradients() -> Sequence[Any]:
    """A penalty on the norm of a gradient."""
    module, x = network(0.0), torch.randn(4, 8, requires_grad=True)
    (slope,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    (slope.norm(dim=1) - 1).square().mean().backward()
    return [x.grad, *left_in(module)]


class ByNumpy(torch.autograd.Function):
    """A function of its own: its sine is NumPy's, it writes to one argument, and keeps something on the side."""

    @staticmethod
    def forward(ctx: Any, x: Any, y: Any) -> Any:
        y.add_(x)
        ctx.mark_dirty(y)
        ctx.save_for_backward(x)
        ctx.total = x.sum()
        return torch.from_numpy(np.sin(x.detach().numpy())), y

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> Any:
        (x,) = ctx.saved_tensors
        return slopes[0] * torch.from_numpy(np.cos(x.detach().numpy())) + ctx.total, slopes[1]


def functions_of_their_own() -> Sequence[Any]:
    """autograd.Function."""
    x, y = torch.randn(5, requires_grad=True), torch.randn(5, requires_grad=True)
    one, other = ByNumpy.apply(x * 2, y * 1)
    (one * other).sum().backward()
    return [one, other, x.grad, y.grad]


def checkpointed(reentrant: bool) -> Sequence[Any]:
    """torch.utils.checkpoint inside of the block."""
    module = network()
    x = torch.randn(4, 8, requires_grad=True)
    checkpoint(module[4:], checkpoint(module[:4], x, use_reentrant=reentrant), use_reentrant=reentrant).sum().backward()
    return [x.grad, *left_in(module)]


def packed() -> Sequence[Any]:
    """What autograd saves is turned into something else, and back."""
    module, x = network(), torch.randn(4, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: pickle.dumps(tensor.detach()), pickle.loads):
        module(x).square().sum().backward()
    with torch.autograd.graph.save_on_cpu():
        module(x).square().sum().backward()
    return [x.grad, *left_in(module)]


def watched() -> Sequence[Any]:
    """Hooks of modules, tensors and parameters that read what they are given past the operators."""
    module, found = network(), []

    def see(*given: Any) -> None:
        found.extend(tensor.detach().numpy().sum() for tensor in given)

    module[0].register_forward_hook(lambda module, given, made: see(*given, made))
    module[4].register_full_backward_hook(lambda module, slopes, given: see(*slopes, *given))
    for parameter in module.parameters():
        parameter.register_hook(see)
        parameter.register_post_accumulate_grad_hook(lambda leaf: see(leaf.grad))
    x = torch.randn(4, 8, requires_grad=True)
    y = module(x)
    y.register_hook(lambda slope: found.append(repr(slope)))
    y.square().sum().backward()
    return [*found, *left_in(module)]


def saved() -> Sequence[Any]:
    """State dicts, modules and tensors saved, pickled, copied, and loaded again."""
    module = network()
    y = module(torch.randn(4, 8)).detach() * 2
    file = io.BytesIO()
    torch.save({"state": module.state_dict(), "y": y, "part": y[1:], "module": module}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    twin = network(width=8)
    twin.load_state_dict(loaded["state"])
    copies = [loaded["y"], loaded["part"], pickle.loads(pickle.dumps(y)), *copy.deepcopy([y, y[1:]]), copy.copy(y)]
    deep = copy.deepcopy(module)
    for copied in (twin, deep, loaded["module"]):
        copied(torch.randn(4, 8)).sum().backward()
        copies += left_in(copied)
    return copies


def read() -> Sequence[Any]:
    """Numbers, lists, text, arrays and DLPack, each of a tensor that was evicted just now."""
    x = torch.randn(3, 4)
    looks: list[Callable[[Any], Any]] = [
        lambda y: y.sum().item(), lambda y: y.tolist(), repr, lambda y: f"{y[0, 0]:.3f}", lambda y: float(y[0, 0]),
        lambda y: int(y[1, 1]), lambda y: bool(y[0, 1] > 0), lambda y: y.numpy().tolist(),
        lambda y: np.asarray(y).sum(),
        lambda y: np.sin(y).tolist(),
        lambda y: torch.from_dlpack(y) * 2, lambda y: np.from_dlpack(y).tolist(),
        lambda y: list(y.storage()), lambda y: y.untyped_storage().tolist(), lambda y: torch.tensor(y.tolist()),
        lambda y: [float(row.sum()) for row in y], lambda y: 3.0 in y, lambda y: torch.equal(y, y * 1),
        lambda y: y.data, lambda y: y.view(torch.int32), lambda y: y.share_memory_() + 1, lambda y: y.nonzero(),
        lambda y: torch.view_as_complex(y.view(3, 2, 2)).conj().imag, lambda y: y[y > 0],
        lambda y: pickle.loads(pickle.dumps(y)),
    ]  # fmt: skip
    return [look(x * (2 + at)) for at, look in enumerate(looks)]


def recurrent() -> Sequence[Any]:
    """Recurrent layers in both directions, packed sequences, and single cells."""
    found: list[Any] = []
    for layer in (nn.LSTM(4, 4, 2, dropout=0.3), nn.GRU(4, 4, bidirectional=True), nn.RNN(4, 4)):
        x = torch.randn(2, 2, 4, requires_grad=True)
        layer(x)[0].square().sum().backward()
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([2, 1]))
        nn.utils.rnn.pad_packed_sequence(layer(packed)[0])[0].sum().backward()
        with torch.no_grad():
            found += [layer.eval()(x)[0] * 2, x.grad, *left_in(layer)]
    cell = nn.LSTMCell(4, 4)
    cell(torch.randn(2, 4), cell(torch.randn(2, 4)))[0].sum().backward()
    return [*found, *left_in(cell)]


def parametrized() -> Sequence[Any]:
    """Weights that are functions of others, one of which is updated behind the scenes."""
    of = nn.utils.parametrizations
    module = nn.Sequential(of.spectral_norm(nn.Linear(8, 8)), of.weight_norm(nn.Linear(8, 8)))
    return [*train(module, optim.SGD(module.parameters(), 0.1), 2), *left_in(module)]


def not_dense() -> Sequence[Any]:
    """Sparse, nested and quantized tensors, and a class of tensors."""

    class Mine(torch.Tensor):
        pass

    mine = (torch.randn(3).as_subclass(Mine) * 2).exp()
    nested = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged)
    sparse, rows = torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()
    quantized = torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.quint8)
    values = sparse.coalesce().values() * 2
    padded = nested.sin().to_padded_tensor(0.0)
    x = torch.randn(3, 3)
    return [mine.as_subclass(torch.Tensor), padded, sparse @ x, rows @ x, quantized.dequantize(), values]


def nested_in_one_buffer() -> Sequence[Any]:
    """Nested tensors without a jagged layout: layers and views of them, and their backward passes."""
    layer, x = nn.Linear(3, 3), torch.randn(18) * 2
    nested = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], requires_grad=True)
    padded = torch.nested.to_padded_tensor(layer(nested), 0.0)
    padded.square().sum().backward()
    sizes, strides = torch.tensor([[2, 3], [4, 3]]), torch.tensor([[3, 1], [3, 1]])
    view = torch._nested_view_from_buffer(x, sizes, strides, torch.tensor([0, 6]))
    doubled = (view * 2).to_padded_tensor(0.0)
    return [padded, nested.grad.to_padded_tensor(0.0), layer.weight.grad, doubled, view.to_padded_tensor(1.0)]


def loaded() -> Sequence[Any]:
    """Batches that worker processes make."""
    module = network()
    data = TensorDataset(torch.randn(8, 8) * 2)  # its memory may be gone when the workers begin
    return [module(x).square().mean() for (x,) in DataLoader(data, 4, shuffle=True, num_workers=1)]


SCRIPTS: list[Callable[[], Sequence[Any]]] = [
    lbfgs, sparse_gradients, scaled, accumulated, without_gradients, transforms, gradients_of_gradients,
    functions_of_their_own, packed, watched, saved, read, recurrent, parametrized, not_dense,
    nested_in_one_buffer,
]  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_scripts(script: Callable[[], Sequence[Any]]) -> None:
    """Each gives the same in the block as outside of it."""
    check(script)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_inside(reentrant: bool) -> None:
    """Both modes of torch.utils.checkpoint work inside of a block."""
    check(lambda: checkpointed(reentrant))


def test_batch_sizes_are_read_between_operators() -> None:
    """A recurrent layer has the address of the batch sizes of a packed sequence as it runs: they stay."""
    layer, x, lengths = nn.RNN(2, 2), torch.randn(150, 4, 2), torch.tensor([150, 140, 90, 3])

    def states() -> Any:
        packed = nn.utils.rnn.pack_padded_sequence(x * 2, lengths)
        return nn.utils.rnn.pad_packed_sequence(layer(packed)[0])[0] + 0

    with torch.no_grad():
        expected = states()
        with rt.budget() as block, Evicting(block):
            found = states()
    assert torch.equal(found, expected)
    assert block.stats().rematerializations > 150


def test_what_differs_from_run_to_run_stays() -> None:
    """The bits of `lstsq` do, in plain torch, too: a block does not run it again."""
    left, right = torch.randn(24, 8), torch.randn(24, 5)
    with rt.budget() as block:
        for number in range(30):
            found = torch.linalg.lstsq(left * 1, right).solution
            before = found.tolist()
            other = torch.ones(1000 + 37 * number)  # memory is given out anew
            block.cache.release_memory()
            assert found.tolist() == before
            del other


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="the system cannot fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers() -> None:
    """A DataLoader with worker processes."""
    check(loaded, 0)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend: str) -> None:
    """Inside of a block compiled functions run operator by operator, with the results of the function itself."""
    module = network(0.0)
    compiled = torch.compile(module, backend=backend)
    x = torch.randn(4, 8)
    compiled(x)
    plain = copy.deepcopy(module)
    expected = run(lambda: [*train(plain, optim.SGD(plain.parameters(), 0.1)), *left_in(plain)])
    with rt.budget() as block, Evicting(block):
        found = run(lambda: [*train(compiled, optim.SGD(module.parameters(), 0.1)), *left_in(module)])
        assert block.stats().rematerializations > 0
    assert alike(expected, found) == []
    torch._dynamo.reset()


class Broken(Exception):
    """What a hook raises."""


@pytest.mark.parametrize("error", [Broken, KeyboardInterrupt, MemoryError])
def test_a_step_that_fails(error: type[BaseException]) -> None:
    """After an error in the middle of a backward pass there are ordinary tensors, and the training goes on."""

    def fail(*given: Any) -> None:
        raise error

    results = []
    for inside in (False, True):
        module = network()
        optimizer = optim.Adam(module.parameters())
        torch.manual_seed(1)
        handle = module[4].register_full_backward_hook(fail)
        with ExitStack() as around:
            around.enter_context(pytest.raises(error))
            if inside:
                around.enter_context(Evicting(around.enter_context(rt.budget())))
            train(module, optimizer)
        handle.remove()
        results.append([*train(module, optimizer), *left_in(module)])
    assert alike(*results) == []
