"""Seeing the numbers of a step: how large they are, and how close to full precision."""

from ._compare import compare
from ._comparison import Closeness, Comparison, expect_close
from ._monitor import monitor
from ._monitor_report import Statistics, heat_map
from ._statistics import FormatStatistics, TensorStatistics
