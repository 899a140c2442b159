"""Text for people, as this library reads and writes it: budgets, bytes, seconds, names, tables, warnings."""

from recompute._budget import bytes_or_peak, bytes_or_share, format_bytes, parse_budget
from recompute._names import name_of
from recompute._tables import List, Table, seconds
from recompute._warned import outside, warn

__all__ = [
    "List",
    "Table",
    "bytes_or_peak",
    "bytes_or_share",
    "format_bytes",
    "name_of",
    "outside",
    "parse_budget",
    "seconds",
    "warn",
]
