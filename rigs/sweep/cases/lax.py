"""Operations of `jax.lax` that are elementwise, reduce, or move data."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from rigs.sweep.cases.table import Table

_TABLE = Table("lax", lax)
_add, _call, _each = _TABLE.add, _TABLE.call, _TABLE.each
_MANY = np.where(np.arange(4096) % 1024 == 0, np.arange(4096) // 1024, 0)

_add("abs neg sign square", "plain cancelling")
_add("conj", "plain")
_each("real imag", lambda f, a: f(lax.complex(a, a * a)), "plain cancelling")
_add("exp exp2 expm1 sinh cosh", "plain near")
_add("sin cos tan", "plain near integers")
_add("tanh logistic asinh atan cbrt erf", "plain near")
_add("erfc bessel_i0e bessel_i1e", "plain near wide")
_add(
    "log log1p sqrt rsqrt lgamma digamma reciprocal",
    "plain near wide",
    domain="positive",
)
_add("asin acos atanh erf_inv", "plain near", domain="open")
_add("acosh", "plain near", domain="above_one")
_add("ceil floor round is_finite", "plain integers")
_add("add sub mul", "plain cancelling wide", arity=2)
_add("div atan2", "plain cancelling wide", arity=2, domain="positive")
_add("max min", "plain ties cancelling", arity=2)
_add("eq ne", "ties cancelling", arity=2)
_add("ge gt le lt", "near cancelling", arity=2)
_add("pow rem", "plain near", arity=2, domain="positive")
_add("nextafter", "plain", arity=2)
_add("igamma igammac igamma_grad_a", "plain near", arity=2, domain="positive")
_add("random_gamma_grad", "plain", arity=2, domain="positive")
_add("betainc", "plain", arity=3, domain="unit")
_call(
    "polygamma", lambda a: lax.polygamma(jnp.float32(1), a), "plain", domain="positive"
)
_add("zeta", "plain near", arity=2, domain="above_one")
_call("integer_pow", lambda a: lax.integer_pow(a, 3), "plain near cancelling")
_call("integer_pow", lambda a: lax.integer_pow(a, -2), "near wide", domain="positive")
_call("clamp", lambda a: lax.clamp(99.5, a, 100.5), "cancelling")
_call("clamp", lambda a: lax.clamp(0.001, a, 0.999), "near plain")
_call("select", lambda a, b: lax.select(a > b, a, b), "ties cancelling", arity=2)
_call("select_n", lambda a, b: lax.select_n(a > b, a, b), "ties cancelling", arity=2)
_call("reduce_precision", lambda a: lax.reduce_precision(a, 8, 20), "plain integers")
_call(
    "convert_element_type",
    lambda a: lax.convert_element_type(a, jnp.int32),
    "integers near",
)
_call(
    "bitcast_convert_type",
    lambda a: lax.bitcast_convert_type(a, jnp.int32) >> 8,
    "zero",
)
_add("stop_gradient optimization_barrier", "cancelling plain")
_call("dce_sink", lambda a: (lax.dce_sink(a), a)[1], "cancelling")

_each(
    "reduce_max reduce_min reduce_sum",
    lambda f, a: f(a, axes=(1,)),
    "ties cancelling long",
)
_each("reduce_prod", lambda f, a: f(a, axes=(1,)), "near")
_call("reduce", lambda a: lax.reduce(a, 0.0, lax.add, (1,)), "plain cancelling long")
_each("reduce_and reduce_or reduce_xor", lambda f, a: f(a > 0.99, axes=(1,)), "near")
_each("argmax argmin", lambda f, a: f(a, 1, jnp.int32), "plain near cancelling")
_add("cumsum cummax cummin cumlogsumexp", "plain cancelling long", axis=1)
_add("cumprod", "near", axis=1)
_add("cumsum cummax", "plain", axis=1, reverse=True)
_add("sort", "plain near cancelling")
_call(
    "sort_key_val",
    lambda a, b: lax.sort_key_val(a, b),
    "plain near cancelling",
    arity=2,
)
_call("top_k", lambda a: lax.top_k(a, 4), "plain near cancelling")
_each("approx_max_k approx_min_k", lambda f, a: f(a, 4), "plain cancelling")


def _windows(computation, start, window, strides, padding="VALID"):
    def call(a):
        return lax.reduce_window(a, start, computation, window, strides, padding)

    return call


_call("reduce_window", _windows(lax.add, 0.0, (1, 4), (1, 1)), "plain cancelling")
_call("reduce_window", _windows(lax.max, -jnp.inf, (31, 15), (1, 1), "SAME"), "ties")
_call("reduce_window", _windows(lax.max, -jnp.inf, (31, 15), (1, 1), "SAME"), "zero")
_call("reduce_window", _windows(lax.min, jnp.inf, (9, 9), (1, 1), "SAME"), "cancelling")
_call("reduce_window", _windows(lax.max, -jnp.inf, (2, 2), (2, 2)), "ties")

_call("broadcast", lambda a: lax.broadcast(a, (512,)), "reads")
_call(
    "broadcast_in_dim", lambda a: lax.broadcast_in_dim(a, (512, 8, 16), (1, 2)), "reads"
)
_call("broadcast_like", lambda a: lax.broadcast_like(a[:1], a), "integers")
_call("broadcast_to_rank", lambda a: lax.broadcast_to_rank(a, 3), "integers")
_call("collapse", lambda a: lax.collapse(a, 0, 2), "integers")
_call("concatenate", lambda a, b: lax.concatenate([a, b], 0), "integers", arity=2)
_call("expand_dims", lambda a: lax.expand_dims(a, (0,)), "integers")
_call("squeeze", lambda a: lax.squeeze(a[None], (0,)), "integers")
_call("reshape", lambda a: lax.reshape(a, (16, 64)), "integers")
_call("rev", lambda a: lax.rev(a, (0,)), "integers")
_call("transpose", lambda a: lax.transpose(a, (1, 0)), "integers")
_call("slice", lambda a: lax.slice(a, (0, 2), (64, 10)), "integers")
_call("slice_in_dim", lambda a: lax.slice_in_dim(a, 0, 32), "integers")
_call("index_in_dim", lambda a: lax.index_in_dim(a, 3), "integers")
_call("split", lambda a: lax.split(a, (8, 8), 1), "integers")
_call("stack", lambda a, b: lax.stack([a, b]), "integers", arity=2)
_call("unstack", lambda a: lax.unstack(a[:4]), "integers")
_call("tile", lambda a: lax.tile(a, (512, 1)), "reads")
_call("pad", lambda a: lax.pad(a, 0.1, ((1, 1, 1), (0, 0, 0))), "integers")
_call("dynamic_slice", lambda a: lax.dynamic_slice(a, (3, 0), (8, 16)), "integers")
_call("dynamic_slice_in_dim", lambda a: lax.dynamic_slice_in_dim(a, 3, 8), "integers")
_call("dynamic_index_in_dim", lambda a: lax.dynamic_index_in_dim(a, 3), "integers")
_call(
    "dynamic_update_slice",
    lambda a, b: lax.dynamic_update_slice(a, b[:8], (4, 0)),
    "integers",
    arity=2,
)
_call(
    "dynamic_update_slice_in_dim",
    lambda a, b: lax.dynamic_update_slice_in_dim(a, b[:8], 4, 0),
    "integers",
    arity=2,
)
_call(
    "dynamic_update_index_in_dim",
    lambda a, b: lax.dynamic_update_index_in_dim(a, b[3], 4, 0),
    "integers",
    arity=2,
)
_call("index_take", lambda a: lax.index_take(a, (jnp.asarray(_MANY),), (0,)), "reads")
_GATHER = lax.GatherDimensionNumbers((1,), (0,), (0,))
_call(
    "gather",
    lambda a: lax.gather(a, jnp.asarray(_MANY)[:, None], _GATHER, (1, 16)),
    "reads",
)
_SCATTER = lax.ScatterDimensionNumbers((1,), (0,), (0,))
_TARGETS = np.where(np.arange(64) % 8 == 0, np.arange(64) // 8, 0)[:, None]
_each(
    "scatter_add scatter_sub scatter_max scatter_min",
    lambda f, a, b: f(a, jnp.asarray(_TARGETS), b, _SCATTER),
    "plain cancelling ties",
    arity=2,
)
_each(
    "scatter scatter_mul",
    lambda f, a, b: f(a, jnp.arange(64)[::-1, None], b, _SCATTER, unique_indices=True),
    "plain cancelling ties",
    arity=2,
)
_call(
    "scatter_apply",
    lambda a: lax.scatter_apply(
        a,
        jnp.arange(64)[:, None],
        jnp.square,
        _SCATTER,
        update_shape=(64, 16),
        unique_indices=True,
    ),
    "cancelling",
)
_call("fft", lambda a: lax.fft(a.astype(jnp.complex64), "fft", (16,)), "plain")
_call("complex", lambda a, b: lax.complex(a, b), "plain cancelling", arity=2)
_call("full_like", lambda a: lax.full_like(a, a[0, 0]), "integers")
_call("full", lambda a: lax.full((64, 16), a[0, 0]), "integers")
_call(
    "platform_dependent",
    lambda a: lax.platform_dependent(a, default=jnp.square),
    "cancelling",
)
_call("composite", lambda a: lax.composite(jnp.square, "mpx.square")(a), "cancelling")
_call("rng_uniform", lambda a: a + 0 * lax.rng_uniform(0.0, 1.0, (16,)), "cancelling")

_call("dot", lambda a, b: lax.dot(a, b.T), "plain near cancelling", arity=2)
_call(
    "dot_general",
    lambda a, b: lax.dot_general(a, b, (((1,), (1,)), ((0,), (0,)))),
    "plain near cancelling",
    arity=2,
)
_call(
    "batch_matmul",
    lambda a, b: lax.batch_matmul(a.reshape(4, 16, 16), b.reshape(4, 16, 16)),
    "plain near",
    arity=2,
)
_SIZES = np.array([40, 0, 20, 4], np.int32)
_call(
    "ragged_dot",
    lambda a, b: lax.ragged_dot(a, b.reshape(4, 16, 16), jnp.asarray(_SIZES)),
    "plain near",
    arity=2,
)
_RAGGED = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])
_call(
    "ragged_dot_general",
    lambda a, b: lax.ragged_dot_general(
        a, b.reshape(4, 16, 16), jnp.asarray(_SIZES), _RAGGED
    ),
    "plain near",
    arity=2,
)


def _image(a):
    return a.reshape(2, 8, 8, 8)


def _kernel(b):
    return b.ravel()[:576].reshape(3, 3, 8, 8)


_LAYOUT = ("NHWC", "HWIO", "NHWC")
_call(
    "conv_general_dilated",
    lambda a, b: lax.conv_general_dilated(
        _image(a), _kernel(b), (1, 1), "SAME", dimension_numbers=_LAYOUT
    ),
    "plain near",
    arity=2,
)
_call(
    "conv_general_dilated",
    lambda a, b: lax.conv_general_dilated(
        _image(a),
        b.ravel()[:8].reshape(1, 1, 1, 8),
        (1, 1),
        "SAME",
        dimension_numbers=_LAYOUT,
        feature_group_count=8,
    ),
    "cancelling",
    arity=2,
    variant="sums_one",
)
_call(
    "conv",
    lambda a, b: lax.conv(
        a.reshape(2, 8, 8, 8), b.ravel()[:576].reshape(8, 8, 3, 3), (1, 1), "SAME"
    ),
    "plain",
    arity=2,
)
_call(
    "conv_with_general_padding",
    lambda a, b: lax.conv_with_general_padding(
        a.reshape(2, 8, 8, 8),
        b.ravel()[:576].reshape(8, 8, 3, 3),
        (1, 1),
        "SAME",
        (1, 1),
        (1, 1),
    ),
    "plain",
    arity=2,
)
_call(
    "conv_transpose",
    lambda a, b: lax.conv_transpose(
        _image(a), _kernel(b), (2, 2), "SAME", dimension_numbers=_LAYOUT
    ),
    "plain",
    arity=2,
)
_call(
    "conv_general_dilated_local",
    lambda a, b: lax.conv_general_dilated_local(
        a[:2, :, None],
        b.ravel()[:288].reshape(16, 3, 6)[:, :, :2],
        (1,),
        "SAME",
        (3,),
        dimension_numbers=("NWC", "WIO", "NWC"),
    ),
    "plain",
    arity=2,
)
_call(
    "conv_general_dilated_patches",
    lambda a: lax.conv_general_dilated_patches(
        _image(a), (3, 3), (1, 1), "SAME", dimension_numbers=_LAYOUT
    ),
    "plain integers",
)

CASES = _TABLE.cases
