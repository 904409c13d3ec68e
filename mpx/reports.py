"""Types of mpx's reports, for annotations, tests and tools.

`mpx.explain`, `mpx.blame`, `mpx.monitor`, `mpx.compare` and `mpx.expect` return or
raise them; a program that only prints a report needs none of these names.
"""

from ._loss_scaling import StepRecord as StepRecord
from ._memory import StateBytes as StateBytes
from ._settings import Candidate as Candidate
from ._tools._blame import (
    BlameReport as BlameReport,
    Culprit as Culprit,
    Verdict as Verdict,
)
from ._tools._expect import ContractError as ContractError
from ._tools._export import Exported as Exported
from ._tools._inspect import (
    Island as Island,
    Operation as Operation,
    Report as Report,
    Totals as Totals,
)
from ._tools._watch import (
    Closeness as Closeness,
    Comparison as Comparison,
    FormatStatistics as FormatStatistics,
    Statistics as Statistics,
    TensorStatistics as TensorStatistics,
    heat_map as heat_map,
)
