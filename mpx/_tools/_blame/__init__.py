"""Finding what made a step bad: the step is run again and looked into.

`_replay` makes a program of the step. `_graph` opens all programs in it, `_record` runs
it and records what its operations make, turn by turn, `_beginnings` follows what is bad
back to where it began, and `_search` finds the operation that is the cause. `_describe`
and `_origin` say what it is, `_verdict` and `_rows` why it happened.
"""

from ._blame import blame, blamed, refuse_limit
from ._blame_report import Culprit, Verdict
from ._blame_views import BlameReport
from ._replay import refuse_tracers
from ._verdict import StepOf
