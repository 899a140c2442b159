"""pandas and Arrow for recompute: sizes and digests of tables. Imports neither before a value of theirs exists."""

from recompute_tables._arrow import arrow
from recompute_tables._pandas import pandas

__all__ = ["arrow", "pandas"]
