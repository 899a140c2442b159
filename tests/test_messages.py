"""Errors that name what is wrong, and the cure."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest

import recompute as rc
from recompute import _adapters
from recompute.testing import check_invariants


def test_two_caches_are_told_apart() -> None:
    """The error names the argument, the caches and the thread."""
    with rc.Cache(100) as first:
        x = rc.pure(1)
    found: list[str] = []

    def work() -> None:
        y = rc.pure(2)  # in the default cache: nothing was entered in this thread
        for call in (lambda: rc.ap(max, x, y), lambda: rc.ap(dict, a=x, b=y), lambda: rc.ap(max, [x, y])):
            with pytest.raises(ValueError, match="two caches") as raised:
                call()
            found.append(str(raised.value))

    thread = Thread(target=work, name="worker")
    thread.start()
    thread.join()
    assert "argument 2 to the default cache, the others to <Cache" in found[0]
    assert "argument 'b' to the default cache" in found[1]
    assert "one of them to the default cache" in found[2]
    assert all("in thread 'worker'" in message for message in found)
    check_invariants(first, [x])


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda way: way.__name__)
def test_a_cache_that_is_sent_elsewhere(way: Callable[[Any], Any]) -> None:
    """The error says that neither a cache nor a list with one can be copied; its values can."""
    with rc.Cache() as cache:
        value = rc.ap(str, 5)
        for whole in (cache, [cache, value]):
            if way is not copy.copy or whole is cache:
                with pytest.raises(TypeError, match="a cache cannot be copied or pickled; make one in each process"):
                    way(whole)
        way(value)
        check_invariants(cache, [value])


@pytest.mark.parametrize("device", ["gpu", "GPU:0", "cuda", "", "cpu0"])
def test_a_budget_for_a_device_that_nobody_knows(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error lists those that are known, and how others are named."""
    monkeypatch.setattr(_adapters.adapter, "_registered", {})  # else those of other tests might know it
    with pytest.raises(ValueError, match=r"the device .* which no adapter knows; devices are cpu.*'cuda:0'"):
        rc.Cache({device: "1GB"})
    cache = rc.Cache({"cpu": 100, "cuda:0": "1GB"})
    with pytest.raises(ValueError, match="which no adapter knows"):
        cache.budget = {device: "1GB"}
    assert cache.budget == {"cpu": 100, "cuda:0": 10**9}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"settings": 3}, "settings must be .*extend.Settings.*, not 3"),
        ({"settings": []}, r"settings must be .*extend.Settings.*, not \[\]"),
        ({"trace": 3}, "trace must be the name of a file, .*, not 3"),
        ({"trace": b"run.jsonl"}, "trace must be the name of a file, .*, not b'run.jsonl'"),
        ({"verify": "no"}, "verify must be True or False, not 'no'"),
        ({"foresight": "off"}, "foresight must be True or False, not 'off'"),
        ({"search": 3}, "a search is a name, or one of .*, not 3"),
        ({"clock": 3}, "clock must be a function that returns seconds, not 3"),
        ({"tiers": 3}, "tiers are such as .*, not 3"),
        ({"log": "all"}, "log is how many transitions are remembered, such as 10_000, not 'all'"),
    ],
)
def test_an_option_of_a_wrong_type(options: dict[str, Any], says: str) -> None:
    """It is an error when the cache is made, which says what to pass."""
    with pytest.raises((TypeError, ValueError), match=says):
        rc.Cache(**options)


@pytest.mark.parametrize(("name", "meant"), [("budgt", "budget"), ("budget_", "budget"), ("name", None)])
def test_an_attribute_that_a_cache_has_not(name: str, meant: str | None) -> None:
    """What was misspelt changes nothing in silence."""
    cache = rc.Cache(100)
    with pytest.raises(AttributeError, match=f"no '{name}'" + (f".*did you mean '{meant}'" if meant else "")):
        setattr(cache, name, 5)
    assert cache.budget == 100


def test_a_cache_may_be_subclassed() -> None:
    """A subclass has attributes of its own."""

    class Named(rc.Cache):
        def __init__(self, name: str) -> None:
            super().__init__(100)
            self.name = name

    assert Named("a").name == "a"


def test_a_source_that_is_larger_than_the_budget() -> None:
    """No eviction could help, and the error says what would."""
    with rc.Cache(100) as cache:
        with pytest.raises(
            rc.BudgetError, match=r"a source of 1\.0\d kB is larger than the whole budget of 100 B.*rc\.ap"
        ):
            rc.pure(b"x" * 1000)
        check_invariants(cache, [])
        assert cache.stats().used == 0


def shortage(make: Callable[[rc.Cache], object]) -> str:
    """What a BudgetError in a cache of 10 kB says, from the remedies on."""
    with rc.Cache("10kB") as cache, pytest.raises(rc.BudgetError) as caught:
        make(cache)
    return str(caught.value).partition("; ")[2]


def test_remedies_fit_the_case() -> None:
    """A shortage names what helps there: nothing is unpinned where nothing is pinned."""
    kept: list[Any] = []

    def in_sources(_: rc.Cache) -> None:
        kept.extend(rc.pure(bytes(4_000 + number)) for number in range(3))

    def pinned(_: rc.Cache) -> None:
        kept.extend(rc.ap(bytes, 4_000 + number).pin() for number in range(3))

    def locked(_: rc.Cache) -> None:
        def take(payload: bytes) -> bytes:
            return bytes(5_000 + len(payload[:0]))

        big = rc.ap(bytes, 6_000)
        kept.append(rc.ap(take, big))  # its size is not known, and it takes the place of its argument
        kept.append(rc.ap(take, big))

    def too_large(_: rc.Cache) -> None:
        rc.ap(bytes, 20_000, nbytes=20_000)

    said = shortage(in_sources)
    assert said.startswith("raise the budget; or load sources inside of an operation, rc.ap(load, path) instead of")
    assert "tier" in said
    assert "rc.array" in said
    assert "unpin" not in said
    assert "get()" not in said
    said = shortage(pinned)
    assert said == "raise the budget; or unpin() values"
    said = shortage(too_large)
    assert said == "raise the budget, or compute it in parts, each of them a value of its own"
    with rc.Cache("10kB"), pytest.raises(rc.BudgetError, match="a result of 20 kB, which is larger than the whole"):
        too_large(rc.current_cache())
    said = shortage(locked)
    assert "unpin" not in said
    assert said.endswith("let operations take and return less at a time")


@pytest.mark.parametrize(
    "result",
    [
        lambda: (number for number in range(3)),
        lambda: [1, (number for number in range(3))],
        lambda: {"a": (map(str, [1]),)},
        lambda: [[zip([1], [2], strict=True)]],
    ],
)
def test_a_generator_in_a_result(result: Any) -> None:
    """What can be read only once is refused, wherever in the result it is."""
    with rc.Cache() as cache:
        with pytest.raises(TypeError, match=r"can be read only once.*return a list or a tuple instead"):
            rc.ap(result)
        check_invariants(cache, [])


@pytest.mark.parametrize("package", ["torch", "jax", "numpy", "autograd", "cupy"])
def test_an_adapter_without_its_framework(package: str) -> None:
    """Importing it says what is missing and how to install it."""
    code = f"import sys; sys.modules[{package!r}] = None; import recompute_{package}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ModuleNotFoundError: recompute_" + package)
    assert f"pip install '.[{package}]' in a checkout" in done.stderr
