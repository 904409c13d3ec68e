"""Contracts on what the compiler made: memory, donation, collectives, calls; errors."""

import functools
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import mpx

from ...helpers import unchecked_annotations
from .cases import BF16, DATA, F32, HALF, WEIGHTS, broken, mesh_of_eight, shaped, train


def test_memory():
    sizes = train.lower(WEIGHTS, DATA).compile().memory_analysis()
    arguments = 4 * (8 * 16 + 3 * 16 * 16 + 16 * 4 + 32 * 8)
    assert sizes.argument_size_in_bytes == arguments
    temporaries = sizes.temp_size_in_bytes
    limits = {
        "temporaries_at_most": temporaries,
        "arguments_at_most": arguments,
        "memory_at_most": arguments + sizes.output_size_in_bytes + temporaries,
    }
    mpx.expect(train, WEIGHTS, DATA, **limits)
    for claim, limit in limits.items():
        (violation,), text = broken(train, WEIGHTS, DATA, **{claim: limit - 1})
        assert violation.claim == claim
        assert f"at most {limit - 1:,} bytes expected; got {limit:,}." in text
        assert violation.operations
    _, text = broken(train, WEIGHTS, DATA, arguments_at_most=0)
    assert "`w['layers']`: float32[3,16,16]" in text
    # Donated memory counts once.
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    mpx.expect(step, shaped(1000), memory_at_most=4000 + 100)


@pytest.mark.filterwarnings("ignore:Some donated buffers")  # JAX says so, too
def test_donation():
    _, text = broken(jax.jit(jnp.sin), shaped(3), donated_are_aliased=True)
    assert "no argument is donated. Pass `donate_argnums=`" in text
    step = jax.jit(lambda w, x: w + jnp.sum(x["x"]), donate_argnums=(0, 1))
    lowered = step.lower(shaped(3), {"x": shaped(4)})
    (violation,), text = broken(lowered, donated_are_aliased=True)
    assert "2 donated arrays aliased to results expected; 1 are not" in text
    assert "`x['x']`: float32[4]" in text
    (again,), _ = broken(lowered.compile(), donated_are_aliased=True)
    assert again.operations == violation.operations

    # Beside arguments that are not used.
    def step_of(of_x):
        return jax.jit(lambda w, unused, x: (w + 1, of_x(x)), donate_argnums=(0, 2))

    args = shaped(3), shaped(5), shaped(4)
    mpx.expect(step_of(lambda x: {"x": x * 2}), *args, donated_are_aliased=True)
    _, text = broken(step_of(jnp.sum), *args, donated_are_aliased=True)
    assert "2 donated arrays aliased to results expected; got 1: `w`." in text


def gathered(dtype):
    """Weights that lie on eight devices and are gathered for a product."""
    mesh = mesh_of_eight()

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P("d"), P("d")), out_specs=P("d")
    )
    def step(w, x):
        with jax.named_scope("gather"):
            full = jax.lax.all_gather(w.astype(dtype), "d", tiled=True)
        loss = jax.lax.psum(jnp.sum(x), "d")  # a scalar
        return jax.lax.psum_scatter(x @ full.astype(F32), "d", tiled=True) + loss

    return step, shaped(64, 8), shaped(64, 64)


def test_collectives():
    step, *args = gathered("float16")
    mpx.expect(step, *args, collectives={"all-gather": "float16", "all-reduce": ()})
    (violation,), text = broken(step, *args, collectives={"reduce-scatter": HALF})
    assert [x.kind for x in violation.operations] == ["reduce-scatter"]
    assert "only reduce-scatter of bfloat16 or float16 expected; got" in text
    step, *args = gathered("float32")
    (violation,), text = broken(step, *args, collectives={"all-gather": HALF})
    assert "all-gather: float32[8,8] -> float32[64,8], in `jit(step)/" in text
    assert violation.operations[0].is_within("gather")
    mpx.expect(step, *args, collectives={"all-to-all": ()})
    for left_out in ("gather", lambda x: x.bytes <= 8 * 8 * 4):
        halves = {"collectives": {"all-gather": HALF}, "collectives_except": left_out}
        mpx.expect(step, *args, **halves)
    broken(step, *args, collectives={"all-gather": HALF}, collectives_except="other")


def test_a_collective_that_the_compiler_joins_is_looked_at_array_by_array():
    def step(x, y):
        return jax.lax.psum((x, y), "d")

    specs = {"in_specs": (P("d"), P("d")), "out_specs": P()}
    joined = jax.jit(jax.shard_map(step, mesh=mesh_of_eight(), **specs))
    claim = {"collectives": {"all-reduce": ()}}
    args, large = (shaped(64, 64), shaped(64)), lambda x: x.bytes < 1000
    (violation,), _ = broken(joined, *args, **claim, collectives_except=large)
    assert [x.bytes for x in violation.operations] == [8 * 64 * 4]


def test_a_policy_that_a_step_does_not_follow_breaks_its_contract():
    """Biases are summed in float32 whatever a policy says, and can be left out."""
    mesh = mesh_of_eight()

    def loss(w, x):
        return jnp.mean((x @ w["matrix"] + w["bias"][None]) ** 2)

    low = mpx.autocast(loss, dtype="float16")

    def placed(spec, *shape):
        place = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, F32, sharding=place)

    w = {"matrix": placed(P(), 64, 64), "bias": placed(P(), 64)}
    x = placed(P("d"), 64, 64)

    def step_of(policy):
        def step(w, x):
            scaling = mpx.StaticLossScaling(1.0)
            return mpx.filter_grad(low, scaling, policy=policy)(w, x).grads

        return jax.jit(step)

    text = "params=float32,compute=float16,output=float32,reduce=float16"
    claim = {"collectives": {"all-reduce": "float16"}}
    small = {"collectives_except": lambda x: x.bytes <= 4 * 64}
    mpx.expect(step_of(text), w, x, **claim, **small)
    (violation,), _ = broken(step_of(text), w, x, **claim)
    assert [x.bytes for x in violation.operations] == [4 * 64]
    (violation,), _ = broken(step_of(None), w, x, **claim, **small)
    assert [x.bytes for x in violation.operations] == [4 * 64 * 64]


def test_collectives_that_the_partitioner_makes():
    place = NamedSharding(mesh_of_eight(), P("d"))
    w = jax.ShapeDtypeStruct((64, 64), F32, sharding=place)

    def loss(w, x):
        return jnp.sum(jax.nn.relu(x @ w) @ w)

    step = jax.jit(jax.grad(loss))
    (violation,), _ = broken(step, w, w, collectives={"all-gather": "bfloat16"})
    assert violation.operations[0].dtypes == ("float32",)
    halves = [jax.ShapeDtypeStruct(w.shape, jnp.float16, sharding=place)] * 2
    broken(step, *halves, collectives={"all-gather": ()})


def test_callbacks_and_custom_calls():
    def seen(x):
        jax.debug.print("{}", x)
        return x

    def pure(x):
        return jax.pure_callback(np.sin, x, x)

    for step in (seen, pure):
        (violation,), text = broken(jax.jit(step), shaped(3), host_callbacks=False)
        assert len(violation.operations) == 1
        assert f"in `jit({step.__name__})/" in text and "test_expect.py:" in text
    mpx.expect(jax.jit(jnp.sin), shaped(3), host_callbacks=False)
    step, x = jax.jit(jnp.linalg.cholesky), shaped(4, 4)
    mpx.expect(step, x, required_calls="lapack_*potrf*", forbidden_calls="*callback*")
    claims = {"required_calls": ["lapack_*", "*f8"], "forbidden_calls": ["lapack_*"]}
    violations, text = broken(step, x, **claims)
    assert [v.claim for v in violations] == ["required_calls", "forbidden_calls"]
    assert "`*f8` missing. The calls of the program: `lapack_" in text
    assert text.startswith("2 of 2 claims are not met:\n1. `required_calls`")
    call = "__cublas$lt$matmul$f8"
    (violation,), text = broken(train, WEIGHTS, DATA, product_calls=call)
    # Once each: the loop's body stands in the program once.
    assert "every matmul as a call of __cublas$lt$matmul$f8 expected; 8 of 8" in text
    assert {x.kind for x in violation.operations} == {"dot"}


def test_stages_and_wrappers():
    lowered = train.lower(WEIGHTS, DATA)
    small = {"temporaries_at_most": 10**6}
    mpx.expect(lowered, products=HALF, products_except="head", **small)
    mpx.expect(lowered.compile(), **small)
    nnx = pytest.importorskip("flax.nnx")
    for jit in eqx.filter_jit, nnx.jit:
        claims = {"products": BF16, "memory_at_most": 10**6}
        mpx.expect(jit(lambda x: x @ x), jnp.ones((4, 4), BF16), **claims)


@pytest.mark.slow
def test_python_without_assertions():
    """`python -O` drops assert statements; this is none."""
    code = (
        "import jax, mpx\n"
        "x = jax.ShapeDtypeStruct((2, 2), 'float32')\n"
        "try: mpx.expect(jax.jit(lambda x: x @ x), x, products='bfloat16')\n"
        "except AssertionError as error: print(type(error).__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-O", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "ContractError"


STEP, X = jax.jit(jnp.matmul), shaped(2, 2)
CALL, PRODUCTS = [STEP, X, X], {"products": BF16}


@pytest.mark.parametrize(
    ("args", "claims", "error", "match"),
    [
        (CALL, {}, ValueError, r"needs at least one claim"),
        ([str.upper], PRODUCTS, TypeError, r"needs a jitted function with its"),
        ([len, X], PRODUCTS, TypeError, r"Jit the function first"),
        (CALL, {"products": "float17"}, ValueError, r"needs a dtype; got 'float17'"),
        (CALL, {"memory_at_most": 1.5}, TypeError, r"an int; got float 1.5"),
        (CALL, {"products_share": 2}, ValueError, r"at most 1; got int 2"),
        (CALL, {"product_calls": 3}, TypeError, r"`product_calls` of .* strings"),
        (CALL, {"collectives": BF16}, TypeError, r"must map operations to"),
        (
            *(CALL, {"collectives": {"gather": BF16}}, ValueError),
            r"`mpx.expect` must be of `all-gather`, .*; got `gather`",
        ),
    ],
)
def test_errors(args, claims, error, match):
    with unchecked_annotations(), pytest.raises(error, match=match):
        mpx.expect(*args, **claims)


def test_long_lists_are_cut_and_stages_have_errors():
    lowered = STEP.lower(X, X)
    with pytest.raises(TypeError, match=r"takes arguments only for a jitted function"):
        mpx.expect(lowered, X, products=BF16)
    with pytest.raises(ValueError, match=r"reads the program before it is compiled"):
        mpx.expect(lowered.compile(), products=BF16)

    def many(x):
        for _ in range(15):
            x = x @ x
        return x

    _, text = broken(jax.jit(many), shaped(2, 2), products=HALF)
    assert text.count("dot: ") == 12 and "and 3 more" in text


@pytest.mark.third_party
def test_master_weights_keep_a_step_in_half_precision():
    optax = pytest.importorskip("optax")
    tx, w = mpx.master_weights(optax.adam(1e-3)), shaped(16, 16, dtype=BF16)
    state, x = jax.eval_shape(tx.init, w), shaped(8, 16, dtype=BF16)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(w, state, x):
        grad = jax.grad(lambda w: jnp.sum((x @ w).astype(F32)))(w)
        return mpx.optimizer_update(w, tx, state, grad, True)

    mpx.expect(step, w, state, x, products=BF16, donated_are_aliased=True)
