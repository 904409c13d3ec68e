"""Claims about a compiled step (`mpx.expect`), and the errors if one is not met.

In order of reading:

* `_operations`: matmuls, collectives and calls of a lowered or compiled program.
* `_expect`: one check for each claim, and `mpx.expect`.
"""

from ._expect import ContractError, Violation, expect
