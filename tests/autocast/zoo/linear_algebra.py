"""Decompositions and solvers, which have no half precision form."""

import jax
import jax.numpy as jnp
import jax.scipy as jsp

from .program import PRECISE, SOLVE, Tolerance, mean_square, normal, program, weight

SIZE = 8


def positive(w):
    """A positive definite matrix, made by a product."""
    return w @ w.T + jnp.diag(jnp.linspace(1.0, 4.0, SIZE))


def on_a_matrix(key, compute):
    keys = jax.random.split(key)

    def loss(w, b):
        outputs = compute(positive(w), b)
        return mean_square(outputs), outputs

    return loss, (weight(keys[0], SIZE, SIZE), normal(keys[1], SIZE, 3))


@program(SOLVE, PRECISE)
def solve(key):
    return on_a_matrix(key, jnp.linalg.solve)


@program(PRECISE)
def cholesky(key):
    def compute(a, b):
        lower = jnp.linalg.cholesky(a)
        return jsp.linalg.solve_triangular(lower, b, lower=True)

    return on_a_matrix(key, compute)


# Eigenvectors turn by the error over the distance of the eigenvalues.
@program(PRECISE, bfloat16=Tolerance(8e-3, 1.6e-2), float16=Tolerance(1e-3, 2e-3))
def eigenvalues(key):
    def compute(a, b):
        values, vectors = jnp.linalg.eigh(a)
        return (vectors * jnp.log(values)[None]) @ (vectors.T @ b)

    return on_a_matrix(key, compute)


@program(SOLVE, derived=2)
def conjugate_gradients(key):
    def compute(a, b):
        return jsp.sparse.linalg.cg(lambda x: a @ x, b, maxiter=20)[0]

    return on_a_matrix(key, compute)
