"""Seeing what a function does: which operation runs in which precision, and why."""

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
    line_text,
    phase,
    scope_path,
    trace,
)
from ._views import Report
