"""Statistics of the values in a step, and their closeness to full precision.

`_trace` (sources of values), `_statistics` (counts by format), `_monitor` and
`_monitor_report` are `mpx.monitor`; `_comparison` (results, `mpx.expect_close`) and
`_compare` are `mpx.compare`.
"""

from ._compare import compare
from ._comparison import Closeness, Comparison, expect_close
from ._monitor import monitor
from ._monitor_report import Statistics, heat_map
from ._statistics import FormatStatistics, TensorStatistics
