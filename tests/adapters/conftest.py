"""What the modules of one library have in common; a module asks for it with `pytestmark`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def registered_jax() -> Iterator[None]:
    """JAX's arrays are known to the cache, installed or not."""
    from _jax_oracle import registered

    with registered():
        yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """PyTorch adds up in one order, whatever the machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["python", "native"])
def path(request: pytest.FixtureRequest, one_thread: None) -> Iterator[str]:
    """Blocks of PyTorch run on this path: each test of the module runs on both."""
    if request.param == "native":
        from recompute_torch._native.build import status

        if status().reason:
            pytest.skip(str(status()))
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RECOMPUTE_TORCH_NATIVE", raising=False)
        if request.param == "python":
            patch.setenv("RECOMPUTE_TORCH_NATIVE", "0")
        yield request.param


@pytest.fixture(scope="module")
def in_python(one_thread: None) -> Iterator[None]:
    """Blocks of PyTorch run on the Python path, whose inner parts the module looks at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECOMPUTE_TORCH_NATIVE", "0")
        yield


@pytest.fixture(scope="module")
def plain(one_thread: None) -> Any:
    """What two steps of plain torch have in their tensors, and keep."""
    from _torch_steps import plain_steps

    return plain_steps()
