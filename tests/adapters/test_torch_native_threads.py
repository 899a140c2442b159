"""The native path where threads meet: which one is where at what moment is arranged by events, never left to chance."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from threading import Event, Thread
from typing import Any
from weakref import WeakSet

import pytest

torch = pytest.importorskip("torch", reason="the extra 'torch' is not installed")

from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: E402  # after importorskip

import recompute_torch as rt  # noqa: E402
from recompute_torch._blocks import blocks  # noqa: E402
from recompute_torch._native import build, load  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(bool(build.status().reason), reason=str(build.status())),
]


def output(code: str) -> str:
    """Of a program, which may hang or die without what is tested: signal 14 ends it then."""
    found = subprocess.run(
        [sys.executable, "-c", "import signal\nsignal.alarm(60)\n" + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


CHAIN = """
    import threading, torch, recompute as rc, recompute_torch as rt
    torch.set_num_threads(1)
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) * 0.05
    LENGTH = 1200

    def chain():
        made = [x]
        for _ in range(LENGTH):
            made.append((made[-1] @ x).tanh())
        return made

    expected = chain()
"""


def test_two_threads_read_where_a_tensor_was_evicted() -> None:
    """Threads that take no part may read one evicted tensor at the same time, and other ones afterwards."""
    found = output(
        """
        import sys, torch, recompute_torch as rt
        from threading import Event, Thread
        torch.set_num_threads(1)
        sys.setswitchinterval(60)  # a thread goes on until it waits
        one_reads, two_reads, both_have = Event(), Event(), Event()
        library = torch.library.Library("recompute_readers", "DEF")
        library.define("twice(Tensor x) -> Tensor")
        tensors, sums = [], []

        def twice(x):
            if tensors:  # again, for the first reader: the second one comes to the same place, and waits
                one_reads.set()
                two_reads.wait()
                while True:
                    with open(f"/proc/self/task/{two.native_id}/stat") as file:
                        if file.read().rpartition(")")[2].split()[0] == "S":
                            break
            return x * 2

        def read_first():
            ready.wait()
            sums.append(tensors[0].sum().item())
            two.join()
            sums.append(tensors[1].sum().item())

        def read_second():
            one_reads.wait()
            two_reads.set()
            sums.append(tensors[0].sum().item())

        library.impl("twice", twice, "CPU")
        ready = Event()
        one, two = Thread(target=read_first), Thread(target=read_second)
        one.start(), two.start()
        with rt.budget(native=True) as block:
            x = torch.ones(1000)
            made = [torch.ops.recompute_readers.twice(x), x * 3]
            block.cache.release_memory()
            tensors += made
            ready.set()
            one.join()
        print(sorted(sums))
        """
    )
    assert found == "[2000.0, 2000.0, 3000.0]\n"


def test_a_handler_ends_the_history_of_what_is_on_its_way_back() -> None:
    """What Python runs while a chain comes back may use tensors of the chain in any way: the values are right."""
    found = output(
        CHAIN
        + """
    with rt.budget(200 * x.nbytes, native=True) as block:
        made = chain()
        looks = []

        def look():
            looks.append(made[520].resize_(64, 64))  # after 500 others it is next

        block._look_at_repeats = look
        block.cache.release_memory()
        made[-1].sum()
        block.check()
        block.budget = None
        print(len(looks) > 0, all(map(torch.equal, made, expected)))
    """
    )
    assert found == "True True\n"


def test_an_operator_in_a_handler_finds_no_room() -> None:
    """It does not wait for the operator in the middle of which it runs, with several threads in the block."""
    found = output(
        CHAIN
        + """
    with rt.budget(200 * x.nbytes, native=True) as block:
        thread = threading.Thread(target=lambda: x + 1)
        thread.start()
        thread.join()
        made, errors = chain(), []

        def look():
            try:
                torch.ones(1000, 1000)
            except rc.BudgetError as error:
                errors.append(error)

        block._look_at_repeats = look
        block.cache.release_memory()
        made[-1].sum()
        block.budget = None
        print(len(errors) > 0, all(map(torch.equal, made, expected)))
    """
    )
    assert found == "True True\n"


def test_a_fork_in_a_handler() -> None:
    """The child goes on with the operator in the middle of which it was forked off, and with others in new threads."""
    found = output(
        CHAIN
        + """
    import os
    children = []

    def look():
        if not children:
            children.append(os.fork())
            if not children[0]:
                signal.alarm(60)

    with rt.budget(200 * x.nbytes, native=True) as block:
        made = chain()
        block._look_at_repeats = look
        block.cache.release_memory()
        right = [torch.equal(made[-1], expected[-1])]
        for _ in range(2):
            thread = threading.Thread(target=lambda: right.append(torch.equal(made[900] * 2, expected[900] * 2)))
            thread.start()
            thread.join()
        if not children[0]:
            os._exit(0 if right == [True] * 3 else 1)
        print(right, os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]))
    """
    )
    assert found == "[True, True, True] 0\n"


def test_a_hook_of_a_fork_waits_for_an_operator_of_another_thread() -> None:
    """Hooks that run before a fork may wait for other threads of the block: nothing of the block is locked then."""
    found = output(
        """
        import os
        from threading import Event, Thread
        asked, done = Event(), Event()

        def before():
            asked.set()
            print("the operator has ended:", done.wait(20), flush=True)

        os.register_at_fork(before=before)  # first, so it runs last
        import torch, recompute_torch as rt

        def work():
            asked.wait()
            (torch.ones(1000) * 2).sum()
            done.set()

        with rt.budget(native=True):
            thread = Thread(target=work)
            thread.start()
            child = os.fork()
            if not child:
                os._exit(0 if (torch.ones(3) * 2).sum().item() == 6 else 1)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            thread.join()
        """
    )
    assert found == "the operator has ended: True\n0\n"


def test_errors_of_two_threads_at_once() -> None:
    """Each thread gets the error that came out of its own handler."""
    x = torch.eye(16) * 0.9
    library = load.library()
    raised: dict[str, str] = {}

    with rt.budget(native=True) as block:

        def look() -> None:
            raise ValueError(names.pop())

        def chain() -> Any:
            made = x
            for _ in range(700):
                made = (made @ x).tanh()
            return made

        def commit(name: str, meanwhile: Any) -> None:
            def commits(*arguments: Any) -> Any:
                names.append(name)
                result = library.rm_commit(*arguments)
                meanwhile()
                return result

            try:
                load.ended(commits())
            except ValueError as error:
                raised[name] = str(error)

        def other() -> None:
            thread = Thread(target=commit, args=("second", lambda: None))
            thread.start()
            thread.join()

        names: list[str] = []
        kept = [chain(), chain()]
        block._look_at_repeats = look
        block.cache.release_memory()
        commit("first", other)
        block._look_at_repeats = lambda: None
        assert torch.equal(*kept)
    assert raised == {"first": "first", "second": "second"}


def test_the_last_tensor_goes_while_its_memory_comes_back() -> None:
    """Memory that is brought back for a tensor whose last reference another thread drops meanwhile goes, too."""
    library = torch.library.Library("recompute_going", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    again, gone = Event(), Event()
    held: list[Any] = []

    def twice(x: Any) -> Any:
        if held and not again.is_set():
            again.set()
            gone.wait(60)  # until the other thread waits, for the lock
        return x * 2

    def let_go() -> None:
        again.wait(60)
        gone.set()
        held.clear()

    library.impl("twice", twice, "CPU")
    thread = Thread(target=let_go)
    interval = sys.getswitchinterval()
    try:
        with rt.budget(native=True) as block:
            x = torch.ones(1000)
            held.append(torch.ops.recompute_going.twice(x))
            block.cache.release_memory()
            sys.setswitchinterval(60)  # a thread goes on until it waits
            thread.start()
            block.commit()
            thread.join()
            assert block.stats().used == x.nbytes
    finally:
        sys.setswitchinterval(interval)
    assert load.figures(load.library()).values == 0


def test_an_array_of_what_a_kernel_of_another_thread_reads() -> None:
    """The memory that it shows stays, and what was made from the tensor before sees no writes there."""
    found = output(
        """
        import warnings, torch, recompute_torch as rt
        from threading import Event, Thread
        warnings.simplefilter("ignore")  # that a kernel is replaced
        inside, taken = Event(), Event()

        def sine(x):
            x.data_ptr()  # as kernels do
            inside.set()
            taken.wait()
            return torch.cos(x)

        library = torch.library.Library("aten", "IMPL")
        library.impl("sin", sine, "CPU")
        with rt.budget(native=True) as block:
            x = torch.ones(1000) * 2
            y = x * 3
            thread = Thread(target=x.sin)
            thread.start()
            inside.wait()
            array = x.numpy()
            taken.set()
            thread.join()
            block.cache.release_memory()
            array[:] = 5
            print(x.sum().item(), y.sum().item())
        """
    )
    assert found == "5000.0 6000.0\n"


@pytest.mark.parametrize("native", [True, False])
def test_a_block_opens_while_an_optimizer_of_another_thread_steps(native: bool) -> None:
    """The step is a step like any other, and so is the next one."""

    def other() -> None:
        with rt.budget(native=False):
            pass

    def open_another(_: Any) -> None:
        thread = Thread(target=other)
        thread.start()
        thread.join()

    weight = torch.ones(4, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    with rt.budget(native=native) as block:
        block.on_step(open_another)
        last = register_optimizer_step_post_hook(lambda *_: None)
        try:
            for _ in range(2):
                weight.sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        finally:
            last.remove()
        assert len(block.report().steps) == 2
    assert torch.equal(weight, torch.zeros(4))


def test_a_block_opens_while_another_thread_starts_a_thread() -> None:
    """Which blocks are open is asked again then."""
    another = rt.budget(native=False)
    found: list[Any] = []

    def opening(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code is not WeakSet.__iter__.__code__:
            return None
        if event == "return":  # it has just given one of them
            blocks.add(another)
        return opening

    thread = Thread(target=lambda: found.append((torch.ones(3) * 2).sum().item()))
    before = sys.gettrace()
    try:
        with rt.budget(native=True) as block:
            operators = block.stats().operations
            sys.settrace(opening)
            thread.start()
            sys.settrace(before)
            thread.join()
            assert block.stats().operations > operators
    finally:
        sys.settrace(before)
        blocks.discard(another)
    assert found == [6]
