"""Seeing what a function does: which operation runs in which precision, and why."""

from ._explain import explain as explain
from ._report import (
    Island as Island,
    Operation as Operation,
    Totals as Totals,
    is_low as is_low,
)
from ._source_text import (
    function_path as function_path,
    innermost_note as innermost_note,
    line_text as line_text,
    phase as phase,
    scope_path as scope_path,
)
from ._trace import (
    Traced as Traced,
    input_name as input_name,
    trace as trace,
)
from ._units import (
    bytes_text as bytes_text,
    flops_text as flops_text,
    share_text as share_text,
    short_type as short_type,
)
from ._views import Report as Report
