"""The parts of gpu.py about PyTorch, each the rows of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from operator import eq
from statistics import median
from time import perf_counter
from typing import Any, Final

import torch
from _common import say
from _torch_models import TO_COMPILE, TO_TRAIN, Training, checkpointed, straight

import recompute as rc
import recompute_torch as rt

Row = dict[str, Any]
"""What was seen, by whatever name."""

SHARES: Final = (0.8, 0.6, 0.5, 0.4)
MODELS: Final = ("gpt2", "resnet", "unet", "vit")
BATCHES: Final = {"gpt2": 16, "resnet": 16, "unet": 16, "vit": 16}
"""How many times the batch of benchmarks/torch_sizes.py."""
STEPS: Final = 7
LEARNING: Final = 15
"""Steps of a block, at most, before it is timed: by then it has a plan, or will have none."""


def training(model: str, small: bool, batch: int = 4, run: Callable[..., Any] | None = None) -> Any:
    """A training of benchmarks/torch_sizes.py on the device; its batch so many times as large."""
    torch.manual_seed(0)
    made = Training(TO_TRAIN[model](run or straight, small))
    made.module.cuda()
    made.x, made.y = [tensor.cuda().repeat(batch, *[1] * (tensor.dim() - 1)) for tensor in (made.x, made.y)]
    return made


def steps(task: Any, count: int, block: Any = None) -> tuple[float, int, list[float]]:
    """(seconds of the median step, peak by the device's statistics, losses).

    Timed are the last ones: two warm up before, or as many as a block needs to make its plan, at most 15.
    """
    losses: list[float] = []
    for number in range(2 if block is None else LEARNING):
        losses.append(task.step().item())
        if number and block is not None and not block.stats().foresight.startswith(("recording", "planning")):
            break
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(count):
        began = perf_counter()
        losses.append(task.step().item())
        torch.cuda.synchronize()
        seconds.append(perf_counter() - began)
    return median(seconds), torch.cuda.max_memory_allocated(), losses


def ways(model: str, small: bool) -> dict[str, Callable[[], tuple[Any, AbstractContextManager[Any]]]]:
    """A training, and the context in which its steps run, by what the table calls it."""
    batch = 2 if small else BATCHES[model]

    def within(**options: Any) -> Callable[[], tuple[Any, AbstractContextManager[Any]]]:
        return lambda: (training(model, small, batch), rt.budget(**options))

    host = {"cuda:0": [rc.Host("64GB")]}
    return {
        "plain": lambda: (training(model, small, batch), nullcontext()),
        "plain, again": lambda: (training(model, small, batch), nullcontext()),
        "a checkpoint for each block": lambda: (training(model, small, batch, checkpointed), nullcontext()),
        "save_on_cpu, pinned": lambda: (training(model, small, batch), torch.autograd.graph.save_on_cpu(True)),
        "a block without a limit": within(),
        **{f"activations={share:.0%}": within(activations=f"{share:.0%}") for share in SHARES},
        f"activations={SHARES[-1]:.0%}, tier in host memory": within(activations=f"{SHARES[-1]:.0%}", tiers=host),
    }


def torch_steps(small: bool) -> Iterator[Row]:
    """Each way to train in less memory: its peak by the device's statistics, and the time of its median step."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("high")
    for model in MODELS:
        plain: tuple[float, int, list[float]] | None = None
        for way, make in ways(model, small).items():
            row: Row = {"model": model, "way": way}
            task, around = make()
            try:
                with around as block:
                    found = steps(task, STEPS, block if isinstance(block, rt.budget) else None)
                    if isinstance(block, rt.budget):
                        row["repeated"] = block.report().steps[-1].repeated
                        row["foresight"] = block.stats().foresight
                plain = plain or found
                row |= {
                    "ms": round(1e3 * found[0], 1),
                    "times plain": round(found[0] / plain[0], 2),
                    "peak MB": found[1] // 10**6,
                    "of plain": round(found[1] / plain[1], 2),
                    "same losses": all(map(eq, found[2], plain[2])),
                }
            except (rc.BudgetError, torch.OutOfMemoryError) as error:
                row["peak MB"] = type(error).__name__
                say(f"{model}, {way}: {error}")
            yield row
            del task, around, make
            torch.cuda.empty_cache()


def largest(small: bool) -> Iterator[Row]:
    """The largest batch within twice the memory that the first one takes, plainly and in a block."""
    for model in MODELS:
        _, peak, _ = steps(training(model, small, 1), 3)
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(min(1.0, 2 * peak / total))
        row: Row = {"model": model, "memory MB": 2 * peak // 10**6}
        for way, around in (("plain", None), ("block", int(1.8 * peak))):  # the rest is for what lies beside tensors
            fits = 0
            for factor in (1, 2, 3, 4, 6, 8, 12):
                torch.cuda.empty_cache()
                try:
                    task = training(model, small, factor)
                    if around is None:
                        steps(task, 3)
                    else:
                        with rt.budget(around):
                            steps(task, 3)
                except (rc.BudgetError, torch.OutOfMemoryError):
                    break
                finally:
                    task = None
                fits = factor
            row[f"{way}, times the batch"] = fits
        yield row
        torch.cuda.set_per_process_memory_fraction(1.0)


def shortage(small: bool) -> Iterator[Row]:
    """In three quarters of the memory that it takes."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    for model in MODELS:
        _, peak, losses = steps(training(model, small), 4)
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, 0.75 * peak / total))
        row: Row = {"model": model, "memory MB": int(0.75 * peak) // 10**6}
        try:
            with rt.budget("auto") as block:
                _, most, found = steps(training(model, small), 4)
                row |= {"peak MB": most // 10**6, "evicted": block.stats().evictions, "same": found == losses}
        except torch.OutOfMemoryError as error:
            row["failed"] = str(error)[:60]
        yield row
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


def streams(small: bool) -> Iterator[Row]:
    """The same losses on a stream of its own."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    for model in MODELS:
        _, _, losses = steps(training(model, small), 4)
        stream = torch.cuda.Stream()
        task = training(model, small)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), rt.budget(activations="60%") as block:
            took, _, found = steps(task, 4)
            again = block.stats().rematerializations
        yield {"model": model, "same": found == losses, "repeated": again, "seconds": round(took, 4)}


def compiled(small: bool) -> Iterator[Row]:
    """Kernels of inductor with torch's partitioner and with a budget, and a backend without kernels within a budget."""
    torch.set_float32_matmul_precision("high")

    def halved(loss: Any) -> Any:
        step = torch.compile(loss)

        def run(x: Any, y: Any) -> Any:
            with torch._functorch.config.patch(activation_memory_budget=0.5):  # read as it is compiled
                return step(x, y)

        return run

    def planned(share: float, compiler: str) -> Callable[[Any], Any]:
        return lambda loss: rt.compile(loss, of_peak=share, compiler=compiler)

    ways: dict[str, Callable[[Any], Any]] = {
        "eager": lambda loss: loss,
        "inductor": torch.compile,
        "inductor, CUDA graphs": lambda loss: torch.compile(loss, mode="reduce-overhead"),
        "inductor, activation_memory_budget=0.5": halved,
        **{f"rt.compile, inductor, of_peak={share}": planned(share, "inductor") for share in (0.7, 0.5)},
        **{f"rt.compile, boxed, of_peak={share}": planned(share, "boxed") for share in (0.6, 0.4)},
    }
    for model in ("gpt2", "resnet18"):
        base: tuple[float, int] | None = None
        for way, make in ways.items():
            torch._dynamo.reset()
            torch.manual_seed(0)
            task = TO_COMPILE[model](straight, small)
            task.module.cuda()
            x, y = [tensor.cuda().repeat(16, *[1] * (tensor.dim() - 1)) for tensor in (task.x, task.y)]
            row: Row = {"model": model, "way": way}
            try:
                began = perf_counter()
                step = make(task)
                seconds, peak = gradients(step, task.module, x, y)
                base = base or (seconds, peak)
                row |= {"ms": round(1e3 * seconds, 1), "times eager": round(seconds / base[0], 2)}
                row |= {"peak MB": peak // 10**6, "of eager": round(peak / base[1], 2)}
                row["first call and all, s"] = round(perf_counter() - began, 1)
                if way.startswith("rt."):
                    row["planned MB"] = sum(plan.planned for plan in rt.plans(step)) // 10**6
            except Exception as error:  # what one way cannot do says nothing about the next
                row["failed"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:100]}"
            yield row
            torch.cuda.empty_cache()


def gradients(step: Any, module: Any, x: Any, y: Any) -> tuple[float, int]:
    """(seconds of the median loss with its gradients, bytes at the peak beyond those before), after two to warm up."""
    seconds, most = [], 0
    for number in range(STEPS + 2):
        module.zero_grad()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        began = perf_counter()
        step(x, y).backward()
        torch.cuda.synchronize()
        if number > 1:
            seconds.append(perf_counter() - began)
            most = max(most, torch.cuda.max_memory_allocated() - before)
    return median(seconds), most
