"""What the examples train in, and the options of `mpx.autocast` that say so."""

from typing import Any, Literal, get_args

import mpx

Dtype = Literal["float32", "float16", "bfloat16"]
Recipe = Literal["delayed", "current", "row-wise", "block", "mxfp8", "nvfp4", "int8"]
Precision = Dtype | Recipe

DTYPES: tuple[Dtype, ...] = get_args(Dtype)
RECIPES: tuple[Recipe, ...] = get_args(Recipe)

# A recipe computes in bfloat16 and quantizes the operands of linear layers; each has
# its defaults.
AUTOCAST: dict[Precision, dict[str, Any]] = {
    "float32": {"enabled": False},
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
    "delayed": {"recipe": mpx.DelayedScaling()},
    "current": {"recipe": mpx.Float8CurrentScaling()},
    "row-wise": {"recipe": mpx.Float8RowwiseScaling()},
    "block": {"recipe": mpx.Float8BlockScaling()},
    "mxfp8": {"recipe": mpx.MXFP8BlockScaling()},
    "nvfp4": {"recipe": mpx.NVFP4BlockScaling()},
    "int8": {"recipe": mpx.Int8CurrentScaling()},
}
