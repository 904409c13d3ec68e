"""Elementwise functions and comparisons of `jax.numpy`."""

import jax.numpy as jnp

from rigs.sweep.cases.table import Table

_TABLE = Table("numpy", jnp)
_add, _call, _each = _TABLE.add, _TABLE.call, _TABLE.each

_add("abs absolute fabs", "plain ties cancelling")
_add("negative positive real conj conjugate", "plain cancelling")
_add("square", "plain cancelling wide")
_add("exp exp2 expm1 sinh cosh", "plain near zero")
_add("sin cos", "plain near integers wide")
_add("tan", "plain near integers")
_add("sinc", "plain near zero cancelling")
_add("tanh arctan atan arcsinh asinh cbrt", "plain near wide")
_add("deg2rad radians rad2deg degrees", "plain cancelling")
_add("nan_to_num", "plain integers")
_add("i0", "plain near")
_add("sign", "plain ties")
_add("angle imag", "plain")
_add("floor ceil rint round around trunc", "plain integers near")
_add("log log2 log10", "plain near wide cancelling", domain="positive")
_add("log1p sqrt", "plain near wide", domain="positive")
_add("reciprocal", "plain near wide cancelling", domain="positive")
_add("arcsin asin arccos acos", "plain near wide", domain="open")
_add("arctanh atanh", "plain near wide", domain="open")
_add("arccosh acosh", "plain near wide", domain="above_one")
_add("isfinite isnan isinf isneginf isposinf", "plain wide")
_add("signbit iscomplex isreal logical_not", "plain zero")
_add("frexp modf", "plain integers")
_add("spacing", "plain near", domain="positive")

_add("add subtract", "plain ties cancelling wide", arity=2)
_add("multiply", "plain ties cancelling wide", arity=2)
_add("divide true_divide", "plain near cancelling wide", arity=2, domain="positive")
_add("maximum minimum fmax fmin", "plain ties cancelling", arity=2)
_add("arctan2 atan2", "plain ties cancelling wide", arity=2, domain="positive")
_add("hypot", "plain cancelling wide", arity=2, domain="positive")
_add("copysign", "plain cancelling", arity=2)
_add("logaddexp logaddexp2", "plain near cancelling", arity=2)
_add("power pow float_power", "plain near", arity=2, domain="positive")
_add("nextafter", "plain integers", arity=2)
_add("remainder mod fmod floor_divide", "plain near", arity=2, domain="positive")
_add("divmod", "plain near", arity=2, domain="positive")
_each("remainder mod fmod", lambda f, a: f(a, 7.0), "integers wide")
_each("floor_divide divmod", lambda f, a: f(a, 7.0), "integers")
_add("heaviside", "plain ties", arity=2)
_add("equal not_equal", "ties cancelling integers", arity=2)
_add("greater greater_equal less less_equal", "plain near cancelling", arity=2)
_call("greater", lambda a: a > 0.999, "near", variant="constant")
_call("less", lambda a: a < 1100, "integers", variant="constant")
_add("logical_and logical_or logical_xor", "ties", arity=2)
_add("isclose", "plain cancelling", arity=2)
_add("allclose array_equal array_equiv", "ties cancelling", arity=2)
_call("ldexp", lambda a: jnp.ldexp(a, jnp.int32(3)), "plain cancelling")

_call("clip", lambda a: jnp.clip(a, -0.5, 0.5), "plain ties")
_call("clip", lambda a: jnp.clip(a, 99.5, 100.5), "cancelling")
_call("where", lambda a, b: jnp.where(a > b, a, b), "plain ties cancelling", arity=2)
_call(
    "select",
    lambda a, b: jnp.select([a > b, a < 0], [a, b], 0.5),
    "plain ties",
    arity=2,
)
_call(
    "piecewise",
    lambda a: jnp.piecewise(a, [a < 0, a >= 0.99], [jnp.sin, jnp.exp, jnp.tanh]),
    "plain near",
)
_call("polyval", lambda a: jnp.polyval(jnp.array([1.0, -3.0, 3.0, -1.0]), a), "near")
_call("polyval", lambda a: jnp.polyval(jnp.array([0.5, -1.0, 0.3]), a), "plain")
_call("astype", lambda a: jnp.astype(a, jnp.int32), "integers")
_call("astype", lambda a: jnp.astype(a, jnp.float32), "cancelling")
_call("array", lambda a: jnp.array(a), "cancelling")
_call("asarray", lambda a: jnp.asarray(a), "cancelling")
_call("copy", lambda a: jnp.copy(a), "cancelling")
_call("vectorize", lambda a: jnp.vectorize(lambda s: s * s - s)(a), "cancelling")
_call(
    "frompyfunc",
    lambda a: jnp.frompyfunc(lambda s, t: s + t, 2, 1, identity=0).reduce(a, axis=1),
    "cancelling",
)

CASES = _TABLE.cases
