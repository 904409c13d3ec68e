"""Seeing the numbers of a step: how large they are, and how close to full precision."""

from ._closeness import Closeness as Closeness
from ._compare import compare as compare
from ._comparison import Comparison as Comparison, expect_close as expect_close
from ._monitor import monitor as monitor
from ._picture import heat_map as heat_map
from ._report import Statistics as Statistics
from ._statistics import (
    FormatStatistics as FormatStatistics,
    TensorStatistics as TensorStatistics,
)
