"""The public test suite of the array API standard, over the wrapped namespace of NumPy.

The suite is not on the package index, and not part of this repository. `.ci/array-api` fetches the pinned commit, where
there is a network, and runs this module with ARRAY_API_TESTS naming the checkout; otherwise it is skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from outcomes import BY_DESIGN, differences, outcomes, worse

import recompute

SUITE = os.environ.get("ARRAY_API_TESTS", "")
HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(
    not SUITE, reason="the suite array-api-tests is not here; .ci/array-api fetches it, and sets ARRAY_API_TESTS"
)


def run(
    module: str, report: Path, *, evict: bool = False, examples: int = 20, files: Sequence[str] = ("array_api_tests",)
) -> dict[str, str]:
    """The outcomes of the suite on a module: test -> passed, failed or skipped."""
    house = Path(recompute.__file__).parent.parent
    environment = {
        **os.environ,
        "ARRAY_API_TESTS_MODULE": module,
        "PYTHONPATH": os.pathsep.join(map(str, (HERE, house, house / "adapters"))),
        "EVICT": str(int(evict)),
    }
    options = ["-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", "--disable-deadline"]
    options += [f"--max-examples={examples}", f"--junitxml={report}"]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        cwd=SUITE,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    found = outcomes(report) if report.is_file() else {}
    assert "passed" in found.values(), ended.stdout[-2000:] + ended.stderr[-2000:]
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What NumPy itself gives, here and now."""
    return run(np.__name__, tmp_path_factory.mktemp("plain") / "report.xml")


@pytest.mark.parametrize("evict", [False, True], ids=["kept", "evicted after every operation"])
def test_the_suite_has_no_failure_beyond_those_of_numpy(evict: bool, plain: dict[str, str], tmp_path: Path) -> None:
    """Every test of the suite that NumPy passes in the same run, the wrapped namespace passes, but for `BY_DESIGN`."""
    wrapped = run("wrapped_numpy", tmp_path / "report.xml", evict=evict)
    suspects = worse(plain, wrapped)
    if suspects:  # the draws differ from run to run: NumPy may have been lucky
        files = sorted({f"{test.partition('::')[0].replace('.', '/')}.py" for test in suspects})
        again = run(np.__name__, tmp_path / "again.xml", examples=2_000, files=files)
        plain = plain | {test: again[test] for test in suspects if test in again}
    assert differences(plain, wrapped, BY_DESIGN) == []
