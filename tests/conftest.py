"""Hypothesis profiles, what a plain run does, and a watchdog: a test that hangs is a failure with a stack."""

from __future__ import annotations

import faulthandler
import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings

_LONGEST = float(os.environ.get("LONGEST_TEST", "400"))  # seconds; Hypothesis simplifies a failure for up to 300
_stderr: list[int] = []  # the real one, which pytest does not capture

settings.register_profile("default", deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("default"), max_examples=100)
settings.register_profile("thorough", settings.get_profile("default"), max_examples=2000)
settings.register_profile("draft", settings.get_profile("ci"), phases=[Phase.generate])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_report_header(config: pytest.Config) -> str:
    """What a run is going to do, and how long that takes."""
    if config.option.markexpr == "not slow" and settings.get_current_profile_name() == "default":
        return (
            "a plain run: few generated examples, no slow tests; some four minutes on two quiet cores\n"
            'everything, as CI runs it: HYPOTHESIS_PROFILE=ci python -m pytest -n 2 -m ""'
        )
    return (
        f"generated examples: profile {settings.get_current_profile_name()}; tests: {config.option.markexpr or 'all'}"
    )


def pytest_configure(config: pytest.Config) -> None:
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        _stderr.append(os.dup(2))


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
def _watchdog() -> Iterator[None]:
    """Print every stack and end the run if a test takes minutes; `thorough` runs take their time."""
    if settings.get_current_profile_name() != "thorough":
        faulthandler.dump_traceback_later(_LONGEST, exit=True, file=_stderr[-1])
    yield
    faulthandler.cancel_dump_traceback_later()
