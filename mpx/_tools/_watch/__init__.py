"""`mpx.monitor` and `mpx.compare`: statistics of a step's values, and their closeness.

Read `_trace`, `_statistics`, `_monitor`, `_monitor_report`, `_comparison`, `_compare`.
"""

from ._compare import compare
from ._comparison import Closeness, Comparison, expect_close
from ._monitor import monitor
from ._monitor_report import Statistics, heat_map
from ._statistics import FormatStatistics, TensorStatistics
