"""mpx: mixed and low precision training for JAX.

Any JAX function, any model: one line transforms the loss, and a training step for every
precision has these two:

    loss = mpx.autocast(loss)

    result = mpx.filter_value_and_grad(loss, scaling)(model, batch)
    model, opt_state, scaling = mpx.optimizer_step(model, optimizer, opt_state, result)

The names below are in the order of the documentation. The private rooms, bottom up:
`_base`, `_program` (JAX's programs), `_nnx_graph`, `_quantize`, `_settings`,
`_stored_weights`, `_wire` (communicated dtypes), `_loss_scaling`, `_recipe_state`,
`_autocast`, `_step`, `_memory` and `_tools` (reports, guard, command line).
"""

import importlib as _importlib
import importlib.metadata as _metadata
import warnings as _warnings
from typing import TYPE_CHECKING as _TYPE_CHECKING, Any as _Any

from ._base.dtypes import BFLOAT16_MAX as BFLOAT16_MAX
from ._base.dtypes import FLOAT16_MAX as FLOAT16_MAX
from ._base.dtypes import half_precision as half_precision
from ._base.dtypes import half_precision_datatype as half_precision_datatype
from ._base.dtypes import set_half_precision_datatype as set_half_precision_datatype
from ._settings import cast_tree as cast_tree
from ._settings import cast_to_half_precision as cast_to_half_precision
from ._settings import cast_to_full_precision as cast_to_full_precision
from ._settings import cast_to_float16 as cast_to_float16
from ._settings import cast_to_bfloat16 as cast_to_bfloat16
from ._settings import cast_to_float32 as cast_to_float32
from ._autocast import autocast as autocast
from ._settings import Rules as Rules
from ._settings import Rule as Rule
from ._settings import Precision as Precision
from ._quantize import Format as Format
from ._quantize import DelayedScaling as DelayedScaling
from ._quantize import Float8CurrentScaling as Float8CurrentScaling
from ._quantize import Float8BlockScaling as Float8BlockScaling
from ._quantize import Float8RowwiseScaling as Float8RowwiseScaling
from ._quantize import Int8CurrentScaling as Int8CurrentScaling
from ._quantize import MXFP8BlockScaling as MXFP8BlockScaling
from ._quantize import NVFP4BlockScaling as NVFP4BlockScaling
from ._quantize import CustomRecipe as CustomRecipe
from ._settings import cast_function as cast_function
from ._autocast import force_full_precision as force_full_precision
from ._settings import Policy as Policy
from ._settings import get_policy as get_policy
from ._loss_scaling import AbstractLossScaling as AbstractLossScaling
from ._loss_scaling import DynamicLossScaling as DynamicLossScaling
from ._loss_scaling import StaticLossScaling as StaticLossScaling
from ._loss_scaling import NoLossScaling as NoLossScaling
from ._loss_scaling import scaled as scaled
from ._step import init_scaling as init_scaling
from ._step import inference as inference
from ._base.tree import all_finite as all_finite
from ._base.tree import select_tree as select_tree
from ._step import filter_grad as filter_grad
from ._step import filter_value_and_grad as filter_value_and_grad
from ._step import calculate_scaled_grad as calculate_scaled_grad
from ._step import grad as grad
from ._step import value_and_grad as value_and_grad
from ._step import Accumulation as Accumulation
from ._step import GradientResult as GradientResult
from ._memory import init_optimizer as init_optimizer
from ._step import optimizer_update as optimizer_update
from ._step import optimizer_step as optimizer_step
from ._step import skip_nonfinite as skip_nonfinite
from ._memory import full_weights as full_weights, master_weights as master_weights
from ._memory import compress_state as compress_state
from ._memory import full_state as full_state
from ._memory import state_bytes as state_bytes
from ._step import check as check

if _TYPE_CHECKING:
    from ._tools._guard import guard as guard
    from ._tools._inspect import explain as explain
    from ._tools._blame import blame as blame
    from ._tools._watch import monitor as monitor
    from ._tools._watch import compare as compare
    from ._tools._expect import expect as expect
    from ._tools._watch import expect_close as expect_close
    from ._tools._forecast import forecast as forecast
    from ._tools._export import export as export
    from ._tools._export import import_weights as import_weights
    from . import compat as compat, contrib as contrib, nn as nn, nnx as nnx
    from . import quantization as quantization, reports as reports

__version__ = "0.2.0"

# Without the modules below: `from mpx import *` must not need Flax.
__all__ = [
    "BFLOAT16_MAX",
    "FLOAT16_MAX",
    "half_precision",
    "half_precision_datatype",
    "set_half_precision_datatype",
    "cast_tree",
    "cast_to_half_precision",
    "cast_to_full_precision",
    "cast_to_float16",
    "cast_to_bfloat16",
    "cast_to_float32",
    "autocast",
    "Rules",
    "Rule",
    "Precision",
    "Format",
    "DelayedScaling",
    "Float8CurrentScaling",
    "Float8BlockScaling",
    "Float8RowwiseScaling",
    "Int8CurrentScaling",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "CustomRecipe",
    "cast_function",
    "force_full_precision",
    "Policy",
    "get_policy",
    "AbstractLossScaling",
    "DynamicLossScaling",
    "StaticLossScaling",
    "NoLossScaling",
    "scaled",
    "init_scaling",
    "inference",
    "all_finite",
    "select_tree",
    "filter_grad",
    "filter_value_and_grad",
    "calculate_scaled_grad",
    "grad",
    "value_and_grad",
    "Accumulation",
    "GradientResult",
    "init_optimizer",
    "optimizer_update",
    "optimizer_step",
    "skip_nonfinite",
    "full_weights",
    "master_weights",
    "compress_state",
    "full_state",
    "state_bytes",
    "check",
    "guard",
    "explain",
    "blame",
    "monitor",
    "compare",
    "expect",
    "expect_close",
    "forecast",
    "export",
    "import_weights",
]

# Imported at first use: most programs need none of them, and `nnx` imports Flax.
_MODULES = ("compat", "contrib", "nn", "nnx", "quantization", "reports")
_TOOLS = {
    "guard": "._tools._guard",
    "explain": "._tools._inspect",
    "blame": "._tools._blame",
    "monitor": "._tools._watch",
    "compare": "._tools._watch",
    "expect": "._tools._expect",
    "expect_close": "._tools._watch",
    "forecast": "._tools._forecast",
    "export": "._tools._export",
    "import_weights": "._tools._export",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_TOOLS})


def __getattr__(name: str) -> _Any:
    if name in _MODULES:
        return _importlib.import_module(f".{name}", __name__)
    if name in _TOOLS:
        tool = getattr(_importlib.import_module(_TOOLS[name], __name__), name)
        return globals().setdefault(name, tool)
    # The published MPX has the present setting as a module attribute.
    if name == "HALF_PRECISION_DATATYPE":
        return half_precision_datatype()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _warn_of_published_mpx() -> None:
    """Warns if `mixed-precision-for-JAX`, which also installs `mpx`, is installed."""
    try:
        version = _metadata.version("mixed-precision-for-JAX")
    except _metadata.PackageNotFoundError:
        return
    _warnings.warn(
        f"The package mixed-precision-for-JAX {version} is installed beside mpx-jax; "
        "both are imported as `mpx`, and their files overwrite each other. Uninstall "
        "both, then install mpx-jax: it runs programs written for the other.",
        stacklevel=2,
    )


_warn_of_published_mpx()
