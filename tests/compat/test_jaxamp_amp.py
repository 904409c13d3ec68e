"""jaxamp's `amp`: its policies, and where the original does not go."""

import importlib.metadata
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx.compat.jaxamp as ours
from tests.autocast.counting import equations

from ..helpers import unchecked_annotations

try:
    import jaxamp as theirs
except ImportError as error:  # it imports private modules of JAX
    theirs, reason = None, f"jaxamp 0.0.4 cannot be imported: {error}"
else:
    reason = ""
needs_jaxamp = pytest.mark.skipif(theirs is None, reason=reason)

HALF = jnp.float16


@needs_jaxamp
def test_every_public_name_is_there():
    assert importlib.metadata.version("jaxamp") == "0.0.4" == ours.__version__
    names = [n for n, v in vars(theirs).items() if callable(v) or isinstance(v, dict)]
    names = [n for n in names if not n.startswith("_")]
    assert len(names) == 9
    assert set(names) <= set(vars(ours))
    assert ours.default_amp_policy.keys() == theirs.default_amp_policy.keys()


NAMES = ["amp", "amp_stop", "use_original_precision", "use_compute_precision"]
NAMES += ["dynamic_scale_tx", "dynamic_scale_grad", "dynamic_scale_value_and_grad"]


@needs_jaxamp
@pytest.mark.parametrize("name", NAMES)
def test_signatures_agree(name):
    here, there = (
        inspect.signature(getattr(m, name)).parameters for m in (ours, theirs)
    )
    assert [(p.name, p.kind) for p in here.values()] == [
        (p.name, p.kind) for p in there.values()
    ]
    if name.startswith("dynamic"):
        defaults = {k: v.default for k, v in here.items() if not callable(v.default)}
        assert defaults.items() <= {k: v.default for k, v in there.items()}.items()


@needs_jaxamp
@pytest.mark.parametrize("name", ["use_original_precision", "use_compute_precision"])
def test_policy_functions_agree(name):
    x = jnp.ones((), jnp.float32)
    args = (HALF, [np.dtype("float16"), np.dtype("float32")], x, x)
    params = {"preferred_element_type": np.dtype("float32"), "axis": 1, "scale": x}
    here, there = (getattr(m, name)(*args, **params) for m in (ours, theirs))
    assert [a.dtype for a in here[0]] == [a.dtype for a in there[0]]
    assert here[1].keys() == there[1].keys()
    for key in params:
        np.testing.assert_equal(here[1][key], there[1][key])


def dtypes_of(name, fun, *args):
    """The dtypes of the operands of a primitive, wherever it stands."""
    program = equations(jax.make_jaxpr(fun)(*args))
    found = [e.invars for e, _ in program if e.primitive.name == name]
    assert found, name
    return {v.aval.dtype.name for operands in found for v in operands}


@pytest.fixture
def xw(getkey):
    return jax.random.normal(getkey(), (4, 4)), jax.random.normal(getkey(), (4, 4))


def scanned(x, w):
    return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=3)[0]


@jax.custom_vjp
def with_rule(x, w):
    return x @ w


with_rule.defvjp(
    lambda x, w: (x @ w, (x, w)), lambda res, g: (g @ res[1].T, res[0].T @ g)
)

PROGRAMS = {
    "plain": lambda x, w: x @ w,
    "jit": jax.jit(lambda x, w: x @ w),
    "scan": scanned,
    "cond": lambda x, w: jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x + w),
    "remat": jax.checkpoint(lambda x, w: jnp.sin(x @ w)),
    "while": lambda x, w: jax.lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c @ w), x),
    "custom_vjp": with_rule,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_goes_everywhere(name, xw):
    """The original leaves every product but the plain one in float32."""
    program = PROGRAMS[name]
    amp = ours.amp(program)
    assert dtypes_of("dot_general", amp, *xw) == {"float16"}
    out = jax.jit(amp)(*xw)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, program(*xw), rtol=0.02, atol=0.02)

    if name != "while":
        square = lambda f: lambda x, w: jnp.sum(f(x, w) ** 2)  # noqa: E731
        gradient = jax.jit(jax.grad(square(amp), argnums=1))
        assert dtypes_of("dot_general", gradient, *xw) == {"float16"}
        wanted = jax.grad(square(program), argnums=1)(*xw)
        np.testing.assert_allclose(gradient(*xw), wanted, rtol=0.05, atol=0.05)


def test_the_default_policy(xw):
    def f(x, w):
        return jnp.log(jnp.exp(x - w) * w / x + (x + w)) + jnp.sum(x)

    amp = ours.amp(f)
    for name in ("add", "sub"):
        assert dtypes_of(name, amp, *xw) == {"float16"}, name
    for name in ("exp", "mul", "div", "log", "reduce_sum"):
        assert dtypes_of(name, amp, *xw) == {"float32"}, name


@pytest.mark.parametrize("form", ["decorator", "context", "scope"])
def test_amp_stop(form, xw):
    product = jax.jit(lambda x, w: x @ w)
    stopped = ours.amp_stop(product)

    def inside(x, w):
        with ours.amp_stop() if form == "context" else jax.named_scope("amp_stop"):
            return product(x, w)

    f = stopped if form == "decorator" else inside
    assert dtypes_of("dot_general", ours.amp(f), *xw) == {"float32"}


def test_the_outermost_scope_of_the_policy_wins(xw):
    x, w = xw
    policy = {
        **ours.default_amp_policy,
        "outer": ours.use_original_precision,
        "inner": ours.use_compute_precision,
    }

    def f(x, w):
        with jax.named_scope("inner"):
            y = jnp.sin(x)
        with jax.named_scope("outer"), jax.named_scope("inner"):
            return y, jnp.cos(w)

    amp = ours.amp(f, amp_policy=policy)
    assert dtypes_of("sin", amp, x, w) == {"float16"}
    assert dtypes_of("cos", amp, x, w) == {"float32"}


def test_a_policy_function_gets_and_gives_what_the_readme_says(xw):
    seen = []

    def precision_fn(compute_dtype, original_dtypes, *invars, **bind_params):
        seen.append((compute_dtype, original_dtypes, invars, bind_params))
        return [x.astype(jnp.bfloat16) for x in invars], bind_params

    policy = {jax.lax.dot_general_p: precision_fn}
    amp = ours.amp(jax.jit(jnp.dot), compute_dtype=jnp.bfloat16, amp_policy=policy)
    assert dtypes_of("dot_general", amp, *xw) == {"bfloat16"}
    compute_dtype, original, invars, params = seen[0]
    assert compute_dtype == jnp.bfloat16
    assert original == [np.dtype("float32")] * 2 and len(invars) == 2
    assert "dimension_numbers" in params
    assert amp(*xw).dtype == jnp.float32


def test_a_primitive_that_holds_a_program_can_be_left_and_not_cast(xw):
    (jit_p,) = {e.primitive for e in jax.make_jaxpr(jax.jit(jnp.dot))(*xw).eqns}
    policy = {**ours.default_amp_policy, jit_p: ours.use_original_precision}
    amp = ours.amp(jax.jit(jnp.dot), amp_policy=policy)
    assert dtypes_of("dot_general", amp, *xw) == {"float32"}

    with pytest.raises(ValueError, match="contains a program with fixed dtypes"):
        ours.amp(jnp.sin, amp_policy={jit_p: ours.use_compute_precision})


def test_float64_results_come_back_as_they_were_declared():
    with jax.enable_x64(True):
        x = np.full(2, 1 / 3)
        out = ours.amp(lambda x: (x + x) * 1.5)(x)
        assert out.dtype == jnp.float64
        # The sum was rounded to float16, as jaxamp's policy says.
        np.testing.assert_allclose(out, 1.0, rtol=1e-3)


def test_a_decorator_with_options(xw):
    @ours.amp(compute_dtype=jnp.bfloat16)
    def f(x, w):
        """The docstring."""
        return {"y": x @ w, "name": "f"}

    assert (f.__name__, f.__doc__) == ("f", "The docstring.")
    assert f(*xw)["name"] == "f"
    assert dtypes_of("dot_general", lambda *a: f(*a)["y"], *xw) == {"bfloat16"}


def test_what_is_not_touched(xw):
    x, _ = xw
    z = x.astype(jnp.complex64)
    assert ours.amp(lambda z: z @ z + z)(z).dtype == jnp.complex64
    with jax.enable_x64(True):
        d = np.ones((2, 2))
        np.testing.assert_array_equal(ours.amp(lambda d: d @ d)(d), d @ d)
        assert ours.amp(lambda d: d @ d)(d).dtype == jnp.float64


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"f": 3}, "needs a function; got"),
        ({"compute_dtype": jnp.int32}, "floating"),
        (
            {"amp_policy": {jnp.sin: ours.use_compute_precision}},
            r"must map primitives \(`jax.lax.add_p`\)",
        ),
        ({"amp_policy": {"scope": jnp.float16(1)}}, "to policy functions"),
        ({"amp_policy": []}, "must be a dictionary"),
    ],
)
def test_wrong_calls_of_amp_say_what_to_do(options, match):
    function = options.pop("f", jnp.sin)
    with unchecked_annotations(), pytest.raises(TypeError, match=match):
        ours.amp(function, **options)
