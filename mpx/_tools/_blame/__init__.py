"""Finds the cause of a skipped step (`mpx.blame`) by replaying and inspecting it.

In order of reading:

* `_blame_report`: the data of a report; what counts as bad, and the ranges of arrays.
* `_graph`: the program of the step with all programs in it opened.
* `_record`: runs it and records values, by loop iteration and device.
* `_search`: follows bad values back to their beginning, and finds the cause.
* `_replay`: the step as a program that can be run again.
* `_describe`: describes a cause: operation, weight, pass, line, reason.
* `_verdict`: runs variants of the step, and tries rules of `mpx.autocast`.
* `_blame`: `mpx.blame`, and the search for rows of the batch.
* `_blame_views`: the report as text, HTML and JSON.
"""

from ._blame import blame, blamed, refuse_limit
from ._blame_report import Culprit, Verdict
from ._blame_views import BlameReport
from ._replay import refuse_tracers
from ._verdict import StepOf
