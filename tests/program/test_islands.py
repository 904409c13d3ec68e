"""Islands, and what becomes of a program that cannot be ordered by them."""

import jax
import jax.numpy as jnp
import numpy as np

import mpx
from mpx._program import Island, islands, parts, reachable


def loss(w, x):
    return jnp.sum(jnp.tanh(jnp.tanh(x) @ w))


def returning(jaxpr, fixed, may_join):
    """One island of all that is cheap, though a product is on the way through it."""
    alone = [i for i, e in enumerate(jaxpr.eqns) if not islands.is_cheap(e)]
    rest = [i for i in range(len(jaxpr.eqns)) if i not in alone]
    return [*alone, rest], set()


def test_a_program_without_an_order_of_islands_stays_as_it_is_written(monkeypatch):
    w, x = jnp.full((4, 4), 0.1), jnp.ones((2, 4))
    jaxpr = jax.make_jaxpr(loss)(w, x).jaxpr
    wanted = jax.grad(mpx.autocast(loss))(w, x)
    assert any(isinstance(p, Island) for p in parts(jaxpr, (), lambda e: True))
    monkeypatch.setattr(islands, "_groups", returning)
    assert parts(jaxpr, (), lambda e: True) == list(jaxpr.eqns)
    again = jax.grad(mpx.autocast(lambda w, x: loss(w, x)))(w, x)
    np.testing.assert_allclose(again, wanted, rtol=2**-7)


def test_needs_are_followed_from_an_iterator_once_each_and_through_cycles():
    needs, asked = {1: [2, 3], 2: [4], 3: [4], 4: [1], 5: [1]}, []

    def needs_of(thing):
        asked.append(thing)
        return needs[thing]

    assert reachable(iter([1]), needs_of) == {1, 2, 3, 4}
    assert sorted(asked) == [1, 2, 3, 4]
