"""Types of mpx's reports, for annotations, tests and tools.

`mpx.explain`, `mpx.blame`, `mpx.monitor`, `mpx.compare` and `mpx.expect` return or
raise them; a program that only prints a report needs none of these names.
"""

from ._blame import BlameReport as BlameReport, Culprit as Culprit, Verdict as Verdict
from ._contract import ContractError as ContractError
from ._inspect import (
    Island as Island,
    Operation as Operation,
    Report as Report,
    Totals as Totals,
)
from ._loss_scaling import StepRecord as StepRecord
from ._rules import Candidate as Candidate
from ._state_bytes import StateBytes as StateBytes
from ._watch import (
    Closeness as Closeness,
    Comparison as Comparison,
    FormatStatistics as FormatStatistics,
    Statistics as Statistics,
    TensorStatistics as TensorStatistics,
    heat_map as heat_map,
)
