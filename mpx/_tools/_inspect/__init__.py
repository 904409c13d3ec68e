"""Reports which operation runs in which precision, at what cost (`mpx.explain`).

In order of reading:

* `_report`: the data of a report, and how numbers and types are written.
* `_traced`: traces a call; how lines, functions and scopes are written.
* `_costs`: FLOPs, bytes and residuals, counted from shapes.
* `_facts`: follows values: their weights, and the origins of their dtypes.
* `_findings`: precision of an operation, and probable mistakes.
* `_explain`: `mpx.explain` joins all of these.
* `_views`: the report as text, HTML and JSON.
"""

from ._explain import explain
from ._report import (
    Island,
    Operation,
    Totals,
    bytes_text,
    flops_text,
    is_low,
    share_text,
    short_type,
)
from ._traced import (
    Traced,
    function_path,
    innermost_note,
    input_name,
    leg_of,
    line_text,
    phase,
    scope_path,
    trace,
)
from ._views import Report
