"""Decompositions and solvers, which have no half precision form."""

import jax.numpy as jnp
import jax.scipy as jsp

from .program import PRECISE, SOLVE, Tolerance, drawn, mean_square, program

SIZE = 8
on_a_matrix = {"args": drawn((SIZE, SIZE), (SIZE, 3)), "loss_of": mean_square}


def positive(w):
    """A positive definite matrix, made by a product."""
    return w @ w.T + jnp.diag(jnp.linspace(1.0, 4.0, SIZE))


@program(SOLVE, PRECISE, **on_a_matrix)
def solve(w, b):
    return jnp.linalg.solve(positive(w), b)


@program(PRECISE, **on_a_matrix)
def cholesky(w, b):
    lower = jnp.linalg.cholesky(positive(w))
    return jsp.linalg.solve_triangular(lower, b, lower=True)


# Eigenvectors turn by the error over the distance of the eigenvalues.
@program(
    PRECISE,
    **on_a_matrix,
    bfloat16=Tolerance(8e-3, 1.6e-2),
    float16=Tolerance(1e-3, 2e-3),
)
def eigenvalues(w, b):
    values, vectors = jnp.linalg.eigh(positive(w))
    return (vectors * jnp.log(values)[None]) @ (vectors.T @ b)


@program(SOLVE, derived=2, **on_a_matrix)
def conjugate_gradients(w, b):
    a = positive(w)
    return jsp.sparse.linalg.cg(lambda x: a @ x, b, maxiter=20)[0]
