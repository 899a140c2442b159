"""Another distribution has files of the same names: one clear error where both are installed.

It is called `recompute`, and runs commands on other machines. Whichever is installed later overwrites `__init__.py` of
the other, and uninstalling either takes it away.
"""

from __future__ import annotations

from os.path import dirname, exists, join

_THEIRS = ("bundle.py", "remote.py")
"""Files of the other distribution, of names that are none of ours."""


def refuse_a_mixture(folder: str) -> None:
    """Raise ImportError, with the cure, if the package's folder holds the other distribution too. Costs one look."""
    if all(exists(join(folder, name)) for name in _THEIRS):
        raise ImportError(
            f"two distributions are mixed up in {folder}: recompute-cache and another one called recompute, which "
            "share an import name; to mend it: pip uninstall recompute recompute-cache && "
            "pip install . in a checkout (the other one needs an environment of its own)"
        )


refuse_a_mixture(dirname(__file__))
