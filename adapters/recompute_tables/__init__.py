"""pandas, Arrow, Polars and xarray for recompute: sizes and digests. Imports each only when it sees its values."""

from recompute_tables._arrow import arrow
from recompute_tables._pandas import pandas
from recompute_tables._polars import polars
from recompute_tables._xarray import xarray

__all__ = ["arrow", "pandas", "polars", "xarray"]
