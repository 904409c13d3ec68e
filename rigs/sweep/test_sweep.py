"""The sweep itself: can it fail, is it complete, and are its cases right?

One case of each kind runs always; with `--slow` one of each group does, and a few more,
chosen evenly over both. The whole sweep is `python -m rigs.sweep`.
"""

import fnmatch
import math
import zlib
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import jax.scipy as js
import numpy as np
import optax
import pytest

from rigs.sweep import page, results
from rigs.sweep.case import Case
from rigs.sweep.cases import all_cases
from rigs.sweep.explained import EXPLAINED, find_reason
from rigs.sweep.ideal import make_ideal
from rigs.sweep.kinds import KINDS
from rigs.sweep.left_out import LEFT_OUT
from rigs.sweep.measure import is_right, measure

CASES = all_cases()
QUICK = 11  # as many as there are kinds
SLOW = 23
MODULES = {
    "numpy": jnp,
    "numpy.linalg": jnp.linalg,
    "numpy.fft": jnp.fft,
    "nn": jax.nn,
    "lax": jax.lax,
    "special": js.special,
    "ops": jax.ops,
    "optax": optax.losses,
    "linen": nn,
    "equinox": eqx.nn,
    "haiku": hk,
}


def chosen() -> list[Any]:
    """Spreads cases: one of each kind, of each group, of each pair, then the rest."""
    names = sorted(CASES, key=lambda name: zlib.crc32(name.encode()))
    firsts: dict[Any, str] = {}
    for part in (lambda c: c.kind, lambda c: c.group, lambda c: (c.group, c.kind)):
        for name in names:
            firsts.setdefault(part(CASES[name]), name)
    ordered = list(dict.fromkeys([*firsts.values(), *names]))
    slow = ordered[QUICK : QUICK + SLOW]
    slow = [pytest.param(name, marks=pytest.mark.slow) for name in slow]
    return [*ordered[:QUICK], *slow]


@pytest.mark.third_party
@pytest.mark.parametrize("name", chosen())
def test_a_case_is_right_or_explained(name: str):
    result = measure(CASES[name])
    if result.verdict == "wrong" and find_reason(name):
        return
    assert result.verdict in ("right", "overflows"), (
        f"{result}\nSee `python -m rigs.sweep --verbose --name '{name}'`."
    )


@pytest.mark.third_party
def test_the_ideal_in_place_of_autocast_is_right(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mpx.autocast", make_ideal)
    result = measure(Case("numpy.subtract", "cancelling", jnp.subtract, 2))
    assert result.verdict == "right"
    for errors in result.errors.values():
        assert errors.value[0] == errors.value[1]
        assert errors.gradient[0] == errors.gradient[1]


@pytest.mark.third_party
def test_a_difference_rounded_to_half_is_found(monkeypatch: pytest.MonkeyPatch):
    """The function is rounded only where autocast, here a stand-in, runs it."""
    is_rounding = False

    def subtract(a, b):
        if not is_rounding:
            return a - b
        half = [v.astype(jnp.bfloat16).astype(jnp.float32) for v in (a, b)]
        return half[0] - half[1]

    def autocast(function, dtype):
        def rounding(*arguments):
            nonlocal is_rounding
            is_rounding = True
            try:
                return function(*arguments)
            finally:
                is_rounding = False

        return rounding

    monkeypatch.setattr("mpx.autocast", autocast)
    result = measure(Case("programs.rounded", "cancelling", subtract, 2))
    assert result.verdict == "wrong"
    for errors in result.errors.values():
        assert errors.value[0] > 0.1
        assert errors.gradient[0] > 0.1


def test_the_ideal_rounds_products_alone():
    x, w = jnp.full((2, 2), 1 + 2.0**-10), jnp.eye(2)

    def product(x, w):
        return x + 2.0**-12, x @ w, x[:, :1] @ w[:1]

    elementwise, rounded, sums_one = make_ideal(product, "bfloat16")(x, w)
    assert jnp.all(elementwise == x + 2.0**-12)
    assert jnp.all(rounded == 1)
    assert jnp.all(sums_one[:, 0] == 1 + 2.0**-10)


def test_the_ideal_rounds_cotangents_of_products():
    x, w = jnp.ones((2, 2)), jnp.eye(2)

    def loss(w):
        return jnp.sum((1 + 2.0**-10) * (x @ w))

    assert jnp.all(jax.grad(loss)(w) > 2)
    assert jnp.all(jax.grad(make_ideal(loss, "bfloat16"))(w) == 2)


def custom_jvp(f):
    f = jax.custom_jvp(f)
    f.defjvp(lambda primals, tangents: (f(*primals), tangents[0]))
    return f


def custom_vjp(f):
    f = jax.custom_vjp(f)
    f.defvjp(lambda x: (f(x), None), lambda _, g: (g,))
    return f


@pytest.mark.parametrize(
    "around",
    [
        jax.jit,
        jax.checkpoint,
        lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, 1)[0],
        lambda f: lambda x: jax.lax.fori_loop(0, 1, lambda _, c: f(c), x),
        lambda f: (
            lambda x: jax.lax.while_loop(
                lambda c: c[0] < 1, lambda c: (c[0] + 1, f(c[1])), (0, x)
            )[1]
        ),
        lambda f: lambda x: jax.lax.cond(x[0, 0] > 0, f, lambda c: c, x),
        custom_jvp,
        custom_vjp,
    ],
    ids="jit checkpoint scan fori while cond custom_jvp custom_vjp".split(),
)
def test_the_ideal_rounds_inside_of(around):
    x = jnp.full((2, 2), 1 + 2.0**-10)
    found = make_ideal(around(lambda c: c @ jnp.eye(2)), "bfloat16")(x)
    assert jnp.all(found == 1)


def test_the_ideal_keeps_a_custom_derivative_without_a_product():
    @jax.custom_jvp
    def identity(x):
        return x

    identity.defjvp(lambda primals, tangents: (primals[0], 3 * tangents[0]))
    ideal = make_ideal(lambda x: jnp.sum(identity(x)), "bfloat16")
    assert jnp.all(jax.grad(ideal)(jnp.ones(2)) == 3)


def public_callables(module) -> set[str]:
    return {
        name
        for name in dir(module)
        if not name.startswith("_") and callable(getattr(module, name, None))
    }


def is_dtype(value: object) -> bool:
    return isinstance(value, type) and (
        issubclass(value, np.generic) or hasattr(value, "dtype")
    )


@pytest.mark.filterwarnings("ignore")
def test_every_public_function_has_a_case_or_a_reason():
    covered = {case.function for case in CASES.values()}
    in_nn = {id(getattr(jax.nn, name)) for name in public_callables(jax.nn)}
    missing = [
        f"{prefix}.{name}"
        for prefix, module in MODULES.items()
        for name in sorted(public_callables(module))
        if f"{prefix}.{name}" not in covered | LEFT_OUT.keys()
        and not is_dtype(getattr(module, name))
        and not (prefix == "linen" and id(getattr(module, name)) in in_nn)
    ]
    assert not missing


@pytest.mark.filterwarnings("ignore")
def test_nothing_left_out_is_covered_or_gone():
    covered = {case.function for case in CASES.values()}
    assert not covered & LEFT_OUT.keys()
    for name in LEFT_OUT:
        prefix, function = name.rsplit(".", 1)
        assert hasattr(MODULES[prefix], function), name


def test_every_kind_has_cases():
    assert {case.kind for case in CASES.values()} == KINDS.keys()
    assert len(KINDS) == QUICK


def test_the_sweep_is_large():
    assert len({case.function for case in CASES.values()}) >= 600
    assert len(CASES) >= 1200


def test_each_explanation_explains_a_wrong_case():
    rows = results.read()["cases"]
    wrong = [name for name, row in rows.items() if row["verdict"] == "wrong"]
    for pattern in EXPLAINED:
        assert fnmatch.filter(wrong, pattern), f"{pattern} explains nothing"


def test_results_hold_only_cases_that_exist():
    assert results.read()["cases"].keys() <= CASES.keys()


def test_an_error_is_right_next_to_the_ideal():
    assert is_right(0.02, 0)
    assert is_right(0.5, 0.06)
    assert not is_right(0.021, 0.001)
    assert not is_right(math.inf, 0.1)


def test_the_table_counts_each_group():
    rows = {
        "numpy.sin/plain": {"verdict": "right"},
        "numpy.sin/near": {"verdict": "wrong"},
        "lax.sin/near": {"verdict": "overflows"},
    }
    assert page.to_markdown(rows).splitlines()[2:] == [
        "| numpy | 1 | 2 | 1 | 0 | 1 | 0 |",
        "| lax | 1 | 1 | 0 | 0 | 0 | 1 |",
        "| all | 2 | 3 | 1 | 0 | 1 | 1 |",
    ]


def test_the_table_is_written_between_markers(tmp_path):
    file = tmp_path / "page.md"
    file.write_text(f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n")
    page.write_page({"numpy.sin/plain": {"verdict": "right"}}, file)
    text = file.read_text()
    assert text.startswith(f"before\n{page.BEGIN}\n| group |")
    assert text.endswith(f"{page.END}\nafter\n")
    assert "old" not in text
    file.write_text("no markers")
    with pytest.raises(ValueError, match="needs the lines"):
        page.write_page({}, file)
