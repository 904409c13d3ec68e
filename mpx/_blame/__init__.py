"""Finding what made a step bad: the step is run again and looked into.

`_replay` makes a program of the step. `_level` opens what is only called in it,
`_search` finds the operation of a level that is the cause, `_descend` goes into the
loops and branches that it stands in, each with the very operands that it had.
`_describe` and `_origin` say what it is, `_verdict` and `_rows` why it happened.
"""

from ._blame import blame as blame, blamed as blamed, refuse_limit as refuse_limit
from ._replay import refuse_tracers as refuse_tracers
from ._report import Culprit as Culprit, Verdict as Verdict
from ._verdict import StepOf as StepOf
from ._views import BlameReport as BlameReport
