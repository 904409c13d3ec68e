"""Numbers and types as a person reads them."""

import math
import re

_STEPS = ("", "k", "M", "G", "T", "P", "E")
_SHORT = {"bfloat": "bf", "float": "f", "uint": "u", "int": "i", "complex": "c"}
# Formats of fewer than 8 bits have their names whole.
_LONG = re.compile(rf"^({'|'.join(_SHORT)})(?=8_|\d+(\[|$))")


def short_type(text: str) -> str:
    """`bfloat16[8,16]` as `bf16[8,16]`."""
    return _LONG.sub(lambda found: _SHORT[found[1]], text, count=1)


def flops_text(count: int, unit: str = "") -> str:
    """`1.23 G`, with three digits; with a unit `1.23 GFLOPs`."""
    number, prefix = _scaled(count)
    return f"{number} {prefix}{unit}".rstrip()


def bytes_text(count: int) -> str:
    """`1.23 MB`, with three digits; powers of 1000."""
    number, unit = _scaled(count)
    return f"{number} {unit}B"


def count_text(count: int) -> str:
    """`12,345`."""
    return f"{count:,}"


def share_text(share: float) -> str:
    """`96.4 %`; what is not quite everything is never rounded to it."""
    if 0.9995 <= share < 1:
        share = 0.999
    return f"{100 * share:.1f} %"


def _scaled(count: int) -> tuple[str, str]:
    if count < 1000:
        return str(count), ""
    step = min(int(math.log10(count)) // 3, len(_STEPS) - 1)
    number = count / 1000**step
    if number >= 999.5 and step < len(_STEPS) - 1:  # 999,999 is 1.00 M
        step, number = step + 1, number / 1000
    digits = 2 if number < 9.995 else 1 if number < 99.95 else 0
    return f"{number:.{digits}f}", _STEPS[step]
