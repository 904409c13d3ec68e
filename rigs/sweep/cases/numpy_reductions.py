"""Reductions, cumulative functions, sorts and searches of `jax.numpy`."""

import jax.numpy as jnp
import numpy as np

from rigs.sweep.cases.table import Table

_TABLE = Table("numpy", jnp)
_add, _call, _each = _TABLE.add, _TABLE.call, _TABLE.each
_SUMS = "plain cancelling long one"

_add("sum nansum mean nanmean", _SUMS, axis=-1)
_add("average", _SUMS, axis=-1)
_call("average", lambda a, b: jnp.average(a, -1, b), "cancelling near", arity=2)
_add("std var nanstd nanvar", "plain cancelling long zero", axis=-1, ddof=0)
_each("std var", lambda f, a: f(a + 100, -1), "ties")
_add("prod nanprod", "plain near one", axis=-1)
_add("max min amax amin nanmax nanmin", "plain ties long_ties cancelling", axis=-1)
_add("ptp", "plain ties cancelling", axis=-1)
_add("median nanmedian", "plain ties cancelling", axis=-1)
_each("quantile nanquantile", lambda f, a: f(a, 0.3, -1), "plain ties cancelling")
_each("percentile nanpercentile", lambda f, a: f(a, 30.0, -1), "plain cancelling")
_add("argmax argmin nanargmax nanargmin", "plain near cancelling", axis=-1)
_add("all any count_nonzero", "ties zero", axis=-1)
_add("cumsum nancumsum cumulative_sum", "plain cancelling long one", axis=-1)
_add("cumprod nancumprod cumulative_prod", "near one", axis=-1)
_call("trapezoid", lambda a: jnp.trapezoid(a, dx=0.1), "plain cancelling long")
_call("trapezoid", lambda a, b: jnp.trapezoid(a, jnp.cumsum(b, -1)), "near", arity=2)
_add("diff ediff1d", "plain cancelling integers")
_call("gradient", lambda a: jnp.gradient(a, axis=-1), "plain cancelling integers")
_call("gradient", lambda a: jnp.gradient(a), "cancelling", variant="axes")
_add("cov corrcoef", "plain cancelling near")

_add("sort argsort", "plain ties near cancelling", axis=-1)
_call("partition", lambda a: jnp.partition(a, 4), "plain near cancelling")
_call("argpartition", lambda a: jnp.argpartition(a, 0)[:, :1], "plain near cancelling")
_call("lexsort", lambda a, b: jnp.lexsort((a, b)), "ties cancelling", arity=2)
_EDGES = np.linspace(0, 1, 65, dtype="f4")
_call("searchsorted", lambda a: jnp.searchsorted(jnp.asarray(_EDGES), a), "near plain")
_call(
    "searchsorted",
    lambda a: jnp.searchsorted(jnp.linspace(1000.0, 1300.0, 301), a),
    "integers",
)
_call("digitize", lambda a: jnp.digitize(a, jnp.asarray(_EDGES)), "near plain")
_call(
    "digitize", lambda a: jnp.digitize(a, jnp.linspace(98.0, 102.0, 65)), "cancelling"
)
_call("interp", lambda a: jnp.interp(a, _EDGES, np.cos(40 * _EDGES)), "near plain")
_call(
    "interp",
    lambda a: jnp.interp(a, jnp.linspace(98.0, 102.0, 9), jnp.arange(9.0) % 3),
    "cancelling",
)
_call(
    "interp",
    lambda a: jnp.interp(jnp.linspace(-1.0, 5.0, 4096), jnp.arange(4.0), a[0, :4]),
    "reads",
)
_call("histogram", lambda a: jnp.histogram(a, 16, (0.0, 1.0)), "near plain")
_call("histogram", lambda a: jnp.histogram(a, 16), "cancelling")
_call(
    "histogram_bin_edges", lambda a: jnp.histogram_bin_edges(a, 8), "cancelling plain"
)
_call(
    "histogram2d",
    lambda a, b: jnp.histogram2d(a.ravel(), b.ravel(), 4, ((0, 1), (0, 1))),
    "near",
    arity=2,
)
_call(
    "histogramdd",
    lambda a: jnp.histogramdd(a.reshape(-1, 2), 4, ((0, 1), (0, 1))),
    "near",
)
_BINS = np.where(np.arange(1024) % 8 == 0, np.arange(1024) % 5, 0)
_call(
    "bincount",
    lambda a: jnp.bincount(jnp.asarray(_BINS), a.ravel(), length=5),
    "plain cancelling",
)
_call("unique", lambda a: jnp.unique(a, size=32), "ties cancelling")
_call("unique_all", lambda a: jnp.unique_all(a, size=32), "ties")
_call("unique_counts", lambda a: jnp.unique_counts(a, size=32), "ties")
_call("unique_inverse", lambda a: jnp.unique_inverse(a, size=32), "ties")
_call("unique_values", lambda a: jnp.unique_values(a, size=32), "ties cancelling")
_call("union1d", lambda a, b: jnp.union1d(a, b, size=32), "ties", arity=2)
_call("intersect1d", lambda a, b: jnp.intersect1d(a, b, size=8), "ties", arity=2)
_call("setdiff1d", lambda a, b: jnp.setdiff1d(a, b, size=8), "ties", arity=2)
_call("setxor1d", lambda a, b: jnp.setxor1d(a, b, size=8), "ties", arity=2)
_call("isin", lambda a, b: jnp.isin(a, b[0]), "ties integers", arity=2)
_call("nonzero", lambda a: jnp.nonzero(a, size=64), "ties zero")
_call("flatnonzero", lambda a: jnp.flatnonzero(a, size=64), "ties zero")
_call("argwhere", lambda a: jnp.argwhere(a, size=64), "ties zero")
_call("apply_along_axis", lambda a: jnp.apply_along_axis(jnp.var, 1, a), "cancelling")
_call(
    "apply_over_axes",
    lambda a: jnp.apply_over_axes(jnp.sum, a, [0]),
    "plain cancelling",
)

CASES = _TABLE.cases
