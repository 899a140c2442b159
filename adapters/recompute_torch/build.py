"""`python -m recompute_torch.build`: build the native path for the installed torch."""

from __future__ import annotations

import argparse
import sys
from time import perf_counter

from recompute_torch._native.build import Unavailable, build, status


def main() -> int:
    """Build it if it is not there; the exit status is 1 if that cannot be."""
    parser = argparse.ArgumentParser(prog="python -m recompute_torch.build", description=(__doc__ or "").strip())
    parser.add_argument("--anew", action="store_true", help="build it even if it is there")
    parser.add_argument("--status", action="store_true", help="say whether it is there, and build nothing")
    options = parser.parse_args()
    if options.status:
        there = status()
        print(there)
        return 1 if there.reason else 0
    began = perf_counter()
    try:
        path = build(anew=options.anew)
    except Unavailable as error:
        print(f"not built: {error}", file=sys.stderr)
        return 1
    print(f"{path} ({perf_counter() - began:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
