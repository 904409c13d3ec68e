"""The products of experts against float64, group by group."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mpx
from mpx._quantize import RaggedProduct, quantized_product, target_from
from mpx.quantization import Leg, Role
from tests.helpers import slow_but
from tests.quantize import linear_cases as linear
from tests.quantize.linear_cases import CPU, RECIPES, Recipe, assert_close, scales_of

ROWS, DEPTH, COLUMNS = 37, 40, 20
SIZES = np.array([9, 0, 20, 3])  # a group without rows, and 5 rows in no group
PLAIN = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])


def product_of(recipe=None, numbers=PLAIN, dtype="float32", **options) -> RaggedProduct:
    return RaggedProduct(
        recipe=recipe or mpx.Float8CurrentScaling(),
        dtype=np.dtype(dtype),
        target=options.pop("target", CPU),
        dimension_numbers=numbers,
        **options,
    )


def arrays() -> tuple[jax.Array, jax.Array, jax.Array]:
    random = np.random.default_rng(0)
    shapes = (ROWS, DEPTH), (len(SIZES), DEPTH, COLUMNS), (ROWS, COLUMNS)
    return tuple(
        jnp.asarray(scale * random.integers(-127, 128, shape) / 64, "float32")
        for scale, shape in zip((1.0, 0.125, 4.0), shapes, strict=True)
    )


def multiplying(product, sizes=SIZES):
    """By the sizes of groups, or by those that each device is given."""

    def multiply(x, w, scales=None, each=None):
        groups = jnp.asarray(sizes) if each is None else each[0]
        return quantized_product(product, (x, w, groups), scales)

    return multiply


@functools.partial(jax.jit, static_argnums=0)
def result_and_gradients(product, x, w, g, scales=None, sizes=SIZES):
    y, backward = jax.vjp(multiplying(product, sizes), x, w, scales)
    return y, *backward(g.astype(y.dtype))


def late_rows(block: int) -> dict[int, int]:
    """Rows of groups in the blocks that they begin in, behind others.

    And where they stand among blocks of such rows only, one for each group.
    """
    ends = np.cumsum(SIZES)
    return {
        row: group * block + row - (end - size)
        for group, (end, size) in enumerate(zip(ends, SIZES, strict=True))
        for row in range(end - size, end)
        if block and (end - size) % block and row // block == (end - size) // block
    }


def expected(recipe: Recipe, x, w, g) -> tuple[np.ndarray, ...]:
    """The three products of what the oracles leave of the operands."""
    in_group = (np.arange(ROWS) < SIZES.sum())[:, None]
    x, w, g = (np.asarray(a) for a in (x, w, g))
    x, g = x * in_group, g * in_group
    of_x, of_w, of_g = recipe.rounders

    def rows(rounder, x: np.ndarray, for_wgrad: bool = False) -> np.ndarray:
        return rounder(x[None], for_wgrad)[0]

    ends = np.cumsum(SIZES)
    groups = [slice(e - s, e) for e, s in zip(ends, SIZES, strict=True)]

    def in_groups(rounder, x: np.ndarray) -> np.ndarray:
        """With one scale for each group, as if it were one row."""
        found = x.astype(np.float64)
        for here in groups:
            if x[here].size:
                found[here] = rounder(x[here].reshape(1, 1, -1), True).reshape(
                    x[here].shape
                )
        return found

    def columns(rounder, x: np.ndarray, quantizer) -> np.ndarray:
        """In blocks of one group each, with zeros for the rows of others."""
        block = quantizer.block if quantizer else 0
        if quantizer and quantizer.block_dimensions and not block:
            return in_groups(rounder, x)
        late = late_rows(block)
        rows_late, places = list(late), list(late.values())
        starts = np.zeros((max(len(SIZES) * block, ROWS), x.shape[1]))
        starts[places] = x[rows_late]
        rest = x.copy()
        rest[rows_late] = 0
        found = in_columns(rounder, rest, quantizer)
        found[rows_late] = in_columns(rounder, starts, quantizer)[places]
        return found

    def in_columns(rounder, x: np.ndarray, quantizer) -> np.ndarray:
        found = rounder(x.T[None], True)[0]
        if getattr(quantizer, "hadamard", False):  # transformed, which is undone here
            rotation = np.asarray(
                mpx.quantization.hadamard_transform(jnp.eye(16)), np.float64
            )
            found = (found.reshape(-1, 16) @ rotation.T).reshape(found.shape)
        return found.T[: len(x)]

    w_forward = of_w(w.swapaxes(1, 2), False).swapaxes(1, 2)
    of_leg = functools.partial(recipe.recipe.quantizer, leg=Leg.WGRAD)
    w_backward, kept = of_w(w, False), columns(of_x, x, of_leg(Role.INPUT))
    if recipe.backward == "high_precision":
        w_backward, kept = w.astype(np.float64), x.astype(np.float64)
    elif recipe.backward == "dequantized":
        w_backward, kept = w_forward, rows(of_x, x)
    elif recipe.backward is not None:  # one copy, with scales of rows
        w_backward, kept = w_forward, rows(of_x, x)
    first = recipe.recipe.quantizer(Role.GRADIENT)
    is_whole = first and first.block_dimensions == 2 and not first.block
    along = in_groups if is_whole else rows
    dw_of = columns(of_g, g, of_leg(Role.GRADIENT))
    x, dx_of = along(of_x, x), along(of_g, g)
    y, dx = np.zeros((ROWS, COLUMNS)), np.zeros((ROWS, DEPTH))
    dw = np.zeros(w.shape)
    for group, here in enumerate(groups):
        y[here] = x[here] @ w_forward[group]
        dx[here] = dx_of[here] @ w_backward[group].T
        dw[group] = kept[here].T @ dw_of[here]
    return y, dx, dw


@pytest.mark.parametrize(
    "recipe_name",
    slow_but(
        ["delayed", "blocks", "high precision backward", "dequantized backward"],
        RECIPES,
    ),
)
def test_products_of_a_recipe_are_those_of_float64(recipe_name: str):
    recipe, (x, w, g) = RECIPES[recipe_name], arrays()
    found = result_and_gradients(product_of(recipe.recipe), x, w, g, scales_of(recipe))
    for one, other in zip(found, expected(recipe, x, w, g), strict=False):
        assert_close(one, other)


def test_rows_in_no_group_count_for_nothing():
    x, w, g = arrays()
    alone = result_and_gradients(product_of(), x, w, g)
    rest = slice(SIZES.sum(), None)
    there = x.at[rest].set(jnp.inf), w, g.at[rest].set(jnp.nan)
    jax.tree.map(
        np.testing.assert_array_equal, result_and_gradients(product_of(), *there), alone
    )


def test_sizes_of_few_bits_do_not_wrap_around():
    data, sizes = jnp.ones((300, 4)), np.array([100, 150, 50])
    w = jnp.arange(3.0)[:, None, None] * jnp.ones((3, 4, 2))
    run = jax.jit(quantized_product, static_argnums=0)
    rows = np.asarray(run(product_of(), (data, w, sizes.astype("uint8"))))
    expected = 4.0 * np.repeat(np.arange(3), sizes)
    np.testing.assert_allclose(rows[:, 0], expected, rtol=1e-6)


def test_weights_in_another_layout_and_batches():
    x, w, g = arrays()
    alone = result_and_gradients(product_of(), x, w, g)
    swapped = lax.RaggedDotDimensionNumbers((((0,), (1,)), ((), ())), [1], [2])
    found = result_and_gradients(product_of(numbers=swapped), x.T, w.T, g)
    expected = (alone[0], alone[1].T, alone[2].T)
    # The same sums, in the same order or not.
    for one, other in zip(found, expected, strict=False):
        assert_close(one, np.asarray(other))
    batches = lax.RaggedDotDimensionNumbers((((2,), (2,)), ((0,), (0,))), [1], [1])
    twice = [jnp.stack([a, a]) for a in (x, w, g)]
    sizes = np.stack([SIZES, SIZES])
    found = result_and_gradients(product_of(numbers=batches), *twice, sizes=sizes)
    for one, other in zip(found[:3], alone[:3], strict=True):
        for batch in one:
            assert_close(batch, np.asarray(other))


def test_dtypes_amaxes_and_bytes_of_experts():
    product = product_of(mpx.DelayedScaling(), dtype="bfloat16")
    rows = slice(0, SIZES.sum())
    linear.check_delayed_in_bfloat16(multiplying(product), *arrays(), rows, len(SIZES))


@pytest.mark.parametrize("check_vma", slow_but([True], [True, False]))
def test_in_pieces_on_devices(check_vma: bool):
    """Groups of tokens on each device, the same experts on all."""
    x, w, g = arrays()
    x, g = x[: SIZES.sum()], g[: SIZES.sum()]
    sizes = np.array([[4, 0, 10, 2], [5, 0, 10, 1]])
    # What the first and the second device have, of each group.
    order = np.argsort(np.repeat([0, 1] * 4, sizes.T.reshape(-1)), kind="stable")
    recipe, scales = mpx.DelayedScaling(), jnp.zeros(3)
    product = product_of(recipe, manual_axes=("data",), sums_over_devices=not check_vma)
    args = x[order], w, scales, g[order], jnp.asarray(sizes)
    found = linear.gradients_on_two_devices(multiplying(product), check_vma, *args)
    alone = result_and_gradients(product_of(recipe), x, w, g, scales)[1:]
    alone = (alone[0][order], *alone[1:])
    for one, other in zip(found, alone, strict=True):
        assert_close(one, np.asarray(other))


@pytest.mark.parametrize("target", slow_but(["sm_90"], ["sm_90", "tpu7x"]))
def test_the_path_of_another_device_runs_on_the_cpu(target: str):
    x, w, g = arrays()
    there = product_of(target=target_from(target))
    here = result_and_gradients(product_of(), x, w, g)
    found = result_and_gradients(there, x, w, g)
    jax.tree.map(np.testing.assert_array_equal, found, here)


def test_the_copies_of_two_gradients_do_not_wait_at_once():
    """On a GPU, where each product is one of a copy of the rows for each group."""
    product = product_of(dtype="bfloat16", target=target_from("H100"))
    run = jax.jit(functools.partial(result_and_gradients, product))
    program = run.trace(*arrays()).lower(lowering_platforms=("cuda",)).as_text()
    lines = program.splitlines()
    shape = f"tensor<{len(SIZES)}x{DEPTH}x{COLUMNS}xbf16>"
    barriers = [line for line in lines if "optimization_barrier" in line]
    # The weight's gradient, with the codes that the data's is computed from.
    assert sum(shape in line and "f8E5M2" in line for line in barriers) == 1
    results = [line.rpartition("->")[2] for line in lines if "ragged_dot" in line]
    assert len(results) == 3 and not any("f32" in line for line in results)


def test_scales():
    x, w, _ = arrays()
    with pytest.raises(TypeError, match=r"float32\[3\].*got None"):
        multiplying(product_of(mpx.DelayedScaling()))(x, w)
