"""The public test suite of the array API standard, over the wrapped namespace of NumPy.

The suite is not on the package index, and not part of this repository. `.ci/array-api` fetches the pinned commit, where
there is a network, and runs this module with ARRAY_API_TESTS naming the checkout; otherwise it is skipped.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import recompute

SUITE = os.environ.get("ARRAY_API_TESTS", "")
HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(
    not SUITE, reason="the suite array-api-tests is not here; .ci/array-api fetches it, and sets ARRAY_API_TESTS"
)


def failures(module: str, *, evict: bool = False) -> set[str]:
    """The tests of the suite that fail on a module."""
    house = Path(recompute.__file__).parent.parent
    environment = {
        **os.environ,
        "ARRAY_API_TESTS_MODULE": module,
        "PYTHONPATH": os.pathsep.join(map(str, (HERE, house, house / "adapters"))),
        "EVICT": str(int(evict)),
    }
    options = ["-q", "-rfE", "-p", "no:cacheprovider", "--hypothesis-seed=0", "--max-examples=20", "--disable-deadline"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "array_api_tests"],
        cwd=SUITE,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert re.search(r"\d+ passed", run.stdout), run.stdout[-2000:] + run.stderr[-2000:]
    return set(re.findall(r"^(?:FAILED|ERROR) (\S+)", run.stdout, flags=re.MULTILINE))


@pytest.fixture(scope="module")
def known() -> set[str]:
    """What NumPy itself fails."""
    return failures(np.__name__)


@pytest.mark.parametrize("evict", [False, True], ids=["kept", "evicted after every operation"])
def test_the_suite_has_no_failure_beyond_those_of_numpy(evict: bool, known: set[str]) -> None:
    """Every test of the suite that NumPy passes, the wrapped namespace passes, too."""
    assert failures("wrapped_numpy", evict=evict) - known == set()
