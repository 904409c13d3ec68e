"""Products, polynomials, linear algebra and Fourier transforms of `jax.numpy`."""

import jax.numpy as jnp

from rigs.sweep.cases.table import Table

_TABLE = Table("numpy", jnp)
_add, _call = _TABLE.add, _TABLE.call


def square(a):
    """Returns well-conditioned 4 x 4 matrices."""
    return a.reshape(-1, 4, 4) / 4 + 2 * jnp.eye(4)


def symmetric(a):
    """Returns positive definite 4 x 4 matrices, their eigenvalues apart."""
    m = a.reshape(-1, 4, 4) / 20
    return m + jnp.swapaxes(m, -1, -2) + jnp.diag(jnp.array([1.0, 2.0, 4.0, 8.0]))


_PAIRS = "plain cancelling near"
_call("matmul", lambda a, b: a @ b.T, _PAIRS, arity=2)
_call("dot", lambda a, b: jnp.dot(a, b.T), _PAIRS, arity=2)
_call("inner", lambda a, b: jnp.inner(a, b), _PAIRS, arity=2)
_add("vdot vecdot", _PAIRS, arity=2)
_call("tensordot", lambda a, b: jnp.tensordot(a, b, 2), _PAIRS, arity=2)
_call("einsum", lambda a, b: jnp.einsum("ij,kj->ik", a, b), _PAIRS, arity=2)
_call("einsum", lambda a, b: jnp.einsum("ij,ij->ij", a, b), "plain cancelling", arity=2)
_call("matvec", lambda a, b: jnp.matvec(a, b), "plain cancelling", arity=2)
_call("vecmat", lambda a, b: jnp.vecmat(a, b.T), "plain", arity=2)
_call("cross", lambda a, b: jnp.cross(a[:, :3], b[:, :3]), _PAIRS, arity=2)
_call("matmul", lambda a: jnp.cos(a[0, :, None] @ a[1:2, :]), "integers one plain")
_call("convolve", lambda a, b: jnp.convolve(a[0], b[0, :5]), _PAIRS, arity=2)
_call("correlate", lambda a, b: jnp.correlate(a[0], b[0, :5]), _PAIRS, arity=2)
_call("polyadd", lambda a, b: jnp.polyadd(a[0], b[0]), "cancelling", arity=2)
_call("polysub", lambda a, b: jnp.polysub(a[0], b[0]), "cancelling", arity=2)
_call("polymul", lambda a, b: jnp.polymul(a[0], b[0, :4]), "plain cancelling", arity=2)
_call("polydiv", lambda a, b: jnp.polydiv(a[0], b[0, :4] + 3), "near", arity=2)
_call("polyder", lambda a: jnp.polyder(a[0]), "plain integers")
_call("polyint", lambda a: jnp.polyint(a[0]), "plain integers")
_call("poly", lambda a: jnp.poly(a[0, :4]), "plain near")
_call("roots", lambda a: jnp.roots(a[0, :3], strip_zeros=False), "near")
_call(
    "polyfit", lambda a: jnp.polyfit(jnp.linspace(-1, 1, 64), a, 2), "plain cancelling"
)

_LINALG = Table("numpy.linalg", jnp.linalg)


def _linalg(name, kinds, make=square, **options):
    function = getattr(jnp.linalg, name)
    _LINALG.call(name, lambda a: function(make(a), **options), kinds)


for _name in "det inv slogdet".split():
    _linalg(_name, "plain near")
_LINALG.call(
    "det", lambda a: jnp.linalg.det(a[:, :9].reshape(-1, 3, 3)), "plain cancelling"
)
_LINALG.call(
    "det", lambda a: jnp.linalg.det(a.reshape(-1, 2, 2)), "plain cancelling near"
)
_linalg("cholesky", "plain near", symmetric)
_linalg("eigvalsh", "plain near", symmetric)
_LINALG.call("eigh", lambda a: jnp.linalg.eigh(symmetric(a))[0], "plain near")
_LINALG.each("eigvals eig", lambda f, a: f(symmetric(a)), "plain")
_linalg("svdvals", "plain near", symmetric)
_LINALG.call("svd", lambda a: jnp.linalg.svd(symmetric(a))[1], "plain")
_LINALG.call("qr", lambda a: jnp.linalg.qr(square(a))[1], "plain near")
_linalg("pinv", "plain", symmetric)
_linalg("cond", "plain", symmetric)
_linalg("matrix_rank", "plain", symmetric)
_linalg("matrix_power", "plain near", n=3)
_linalg("matrix_norm", "plain near")
_linalg("matrix_transpose", "integers")
_linalg("trace", "plain cancelling")
_linalg("diagonal", "integers")
_LINALG.add("vector_norm norm", "plain cancelling near wide", axis=-1)
_LINALG.add("norm", "plain near", axis=-1, ord=3)
_LINALG.each(
    "solve tensorsolve",
    lambda f, a, b: f(square(a)[0], b.reshape(-1, 4)[0]),
    "plain near",
    arity=2,
)
_LINALG.call("tensorinv", lambda a: jnp.linalg.tensorinv(square(a)[0], 1), "plain")
_LINALG.call(
    "lstsq", lambda a, b: jnp.linalg.lstsq(a[:, :3], b[:, :2])[0], "plain", arity=2
)
_LINALG.call(
    "multi_dot", lambda a, b: jnp.linalg.multi_dot([a, b.T, a]), "plain", arity=2
)
_LINALG.call("matmul", lambda a, b: jnp.linalg.matmul(a, b.T), "plain", arity=2)
_LINALG.call("outer", lambda a, b: jnp.linalg.outer(a[0], b[0]), "integers", arity=2)
_LINALG.call(
    "tensordot", lambda a, b: jnp.linalg.tensordot(a, b.T, axes=1), "plain", arity=2
)
_LINALG.call("vecdot", jnp.linalg.vecdot, "plain cancelling", arity=2)
_LINALG.call(
    "cross", lambda a, b: jnp.linalg.cross(a[:, :3], b[:, :3]), "cancelling", arity=2
)

_FFT = Table("numpy.fft", jnp.fft)
_FFT.add("fft ifft rfft ihfft", "plain cancelling")
_FFT.add("fft2 ifft2 fftn ifftn rfft2 rfftn", "plain")
_FFT.add("irfft hfft", "plain")
_FFT.add("irfft2 irfftn", "plain")
_FFT.add("fftshift ifftshift", "integers")
_FFT.call(
    "rfft", lambda a: jnp.fft.irfft(jnp.fft.rfft(a) * jnp.fft.rfftfreq(16)), "near"
)

CASES = [*_TABLE.cases, *_LINALG.cases, *_FFT.cases]
