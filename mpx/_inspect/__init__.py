"""Seeing what a function does: which operation runs in which precision, and why."""

from ._explain import explain as explain
from ._report import (
    Island as Island,
    Operation as Operation,
    Totals as Totals,
)
from ._views import Report as Report
