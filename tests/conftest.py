"""Hypothesis profiles, what a plain run does, the form under test, and a watchdog: who hangs fails with a stack."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

import pytest
from hypothesis import HealthCheck, Phase, settings

_LONGEST = float(os.environ.get("LONGEST_TEST", "400"))  # seconds; Hypothesis simplifies a failure for up to 300
_stderr: list[int] = []  # the real one, which pytest does not capture

settings.register_profile("default", deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("default"), max_examples=50, derandomize=True)
settings.register_profile("thorough", settings.get_profile("default"), max_examples=2000)
settings.register_profile("draft", settings.get_profile("default"), phases=[Phase.generate])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Which form of the library is tested, what a run is going to do, and how long that takes."""
    from recompute import __file__, _form

    return [f"recompute of {os.path.dirname(__file__)}, {_form.described()}", *_what_runs(config)]


def _what_runs(config: pytest.Config) -> list[str]:
    if config.option.markexpr == "not slow" and settings.get_current_profile_name() == "default":
        return [
            "a plain run: few generated examples, no slow tests; some five minutes on two quiet cores\n"
            'everything, as CI runs it: HYPOTHESIS_PROFILE=ci python -m pytest -n 2 -m ""',
        ]
    return [
        f"generated examples: profile {settings.get_current_profile_name()}; tests: {config.option.markexpr or 'all'}"
    ]


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in what a shell script starts in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        _stderr.append(os.dup(2))
    try:
        from recompute import _form
    except ImportError as error:  # RECOMPUTE_REQUIRE_COMPILED, or a mixture
        raise pytest.UsageError(str(error)) from error
    if not _form.asked("RECOMPUTE_REQUIRE_COMPILED") and _form.name() == "plain":
        os.environ["RECOMPUTE_PLAIN"] = "1"  # the processes that tests start have this form, too, and do not warn


@pytest.fixture(autouse=True)
def _short_collections() -> Iterator[None]:
    """The garbage collector looks at what a test has made, and not at every module that is loaded, each time again.

    In the end it sees to the caches of the test: their threads and files go with them.
    """
    gc.freeze()
    gc.collect()  # of nothing: now the collector knows that there is little, and looks at the old objects as often
    yield
    gc.collect()
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _nobody_keeps_the_lock() -> Iterator[None]:
    """After a test this thread holds no cache's lock: others would wait for ever."""
    yield
    from recompute._engine.changes import shared

    assert not shared.lock._is_owned()


@pytest.fixture
def no_python_while_the_collector_is_off() -> Iterator[None]:
    """No line of Python runs in a change that has switched the collector off: between lines other threads may run."""
    from recompute._engine.changes import COMPILED, shared

    if not COMPILED:  # nothing switches it off, and for a profiler each frame is an object, for which it may start
        yield
        return
    seen = set()

    def look(frame: FrameType, event: str, _: object) -> None:
        if shared.off and event == "call":
            seen.add(f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_qualname}")

    threading.setprofile(look)
    sys.setprofile(look)
    yield
    sys.setprofile(None)
    threading.setprofile(None)
    assert not seen


@pytest.fixture(autouse=True)
def _watchdog() -> Iterator[None]:
    """Print every stack and end the run if a test takes minutes; `thorough` runs take their time."""
    if settings.get_current_profile_name() != "thorough":
        faulthandler.dump_traceback_later(_LONGEST, exit=True, file=_stderr[-1])
    yield
    faulthandler.cancel_dump_traceback_later()
