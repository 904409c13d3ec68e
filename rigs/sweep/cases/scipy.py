"""Functions of `jax.scipy`, `jax.ops` and `jax.image`."""

import jax
import jax.numpy as jnp
import jax.scipy as js
import numpy as np
from jax.scipy import special

from rigs.sweep.cases.numpy_products import square, symmetric
from rigs.sweep.cases.table import Table

_SPECIAL = Table("special", special)
_add, _call, _each = _SPECIAL.add, _SPECIAL.call, _SPECIAL.each
_add("erf erfc expit log_ndtr ndtr i0 i0e i1 i1e", "plain near wide")
_add("erfcx dawsn", "plain near wide", domain="positive")
_add("sici fresnel wofz", "plain near", domain="positive")
_add("log_softmax softmax", "plain cancelling one")
_add("logsumexp", "plain cancelling long one", axis=-1)
_add("digamma gamma gammaln loggamma gammasgn spence", "plain near", domain="positive")
_add("entr", "plain near wide", domain="positive")
_each("exp1 expi", lambda f, a: f(a[:8]), "plain near", domain="positive")
_add("erfinv", "plain near", domain="open")
_add("logit ndtri", "plain near wide", domain="unit")
_add("beta betaln poch", "plain near", arity=2, domain="positive")
_add("gammainc gammaincc", "plain near", arity=2, domain="positive")
_add("betainc", "plain", arity=3, domain="unit")
_add("rel_entr kl_div", "plain near wide", arity=2, domain="positive")
_add("rel_entr kl_div", "cancelling", arity=2)
_add("xlogy xlog1py boxcox boxcox1p", "plain near", arity=2, domain="positive")
_add("comb", "near", arity=2, domain="above_one")
_add("zeta", "plain near", arity=2, domain="above_one")
_add("owens_t", "plain", arity=2, domain="positive")
_add("hyp1f1", "plain", arity=3, domain="unit")
_call(
    "hyp2f1",
    lambda a, b: special.hyp2f1(a[0], b[0], 2.5, a[0] * b[0]),
    "plain",
    arity=2,
    domain="unit",
)
_call("factorial", special.factorial, "plain", domain="positive")
_call("expn", lambda a: special.expn(2, a), "plain near", domain="positive")
_call("polygamma", lambda a: special.polygamma(1, a), "plain near", domain="positive")
_call(
    "multigammaln",
    lambda a: special.multigammaln(a + 1, 2),
    "plain near",
    domain="positive",
)
_call("bessel_jn", lambda a: special.bessel_jn(a[0], v=3), "plain near")
_call("bernoulli", lambda a: a * special.bernoulli(4)[4], "plain")
_call(
    "sph_harm_y",
    lambda a, b: special.sph_harm_y(
        jnp.array([2]), jnp.array([1]), a.ravel()[:64], b.ravel()[:64], n_max=2
    ),
    "plain",
    arity=2,
)

_STATS = Table("stats", js.stats)


def _distribution(name, kinds, functions, domain="real", shift=()):
    module = getattr(js.stats, name)
    for function in functions.split():
        call = getattr(module, function)
        _STATS.call(
            f"{name}.{function}", lambda a, f=call: f(a, *shift), kinds, domain=domain
        )


_ALL = "logpdf pdf cdf logcdf sf logsf"
_distribution("norm", "plain near", _ALL)
_STATS.call("norm.logpdf", lambda a: js.stats.norm.logpdf(a, 100.0, 0.1), "cancelling")
_distribution("norm", "near", "ppf isf", "unit")
_distribution("cauchy", "plain near", _ALL)
_distribution("cauchy", "near", "ppf isf", "unit")
_distribution("laplace", "plain near", "logpdf pdf cdf")
_distribution("logistic", "plain near", "logpdf pdf cdf sf")
_distribution("logistic", "near", "ppf isf", "unit")
_distribution("gumbel_l", "plain near", "logpdf pdf logcdf cdf sf logsf")
_distribution("gumbel_r", "plain near", "logpdf pdf logcdf cdf sf logsf")
_distribution("gumbel_r", "near", "ppf", "unit")
_distribution("gumbel_l", "near", "ppf", "unit")
_distribution("uniform", "near plain", "logpdf pdf cdf ppf", "unit")
_distribution("expon", "plain near", "logpdf pdf cdf logcdf sf logsf", "positive")
_distribution("expon", "near", "ppf", "unit")
_distribution("beta", "near plain", _ALL, "unit", (2.0, 3.0))
_distribution("gamma", "plain near", _ALL, "positive", (2.0,))
_distribution("chi2", "plain near", _ALL, "positive", (3.0,))
_distribution(
    "pareto", "plain near", "logpdf pdf cdf logcdf sf logsf ppf", "above_one", (2.0,)
)
_distribution("t", "plain near", "logpdf pdf", "real", (4.0,))
_distribution("gennorm", "plain near", "logpdf cdf pdf", "real", (1.5,))
_distribution("vonmises", "plain near", "logpdf pdf", "real", (4.0,))
_distribution("wrapcauchy", "near plain", "logpdf pdf", "positive", (0.5,))
_distribution(
    "truncnorm", "near plain", "logpdf pdf logcdf cdf sf logsf", "unit", (-1.0, 1.0)
)
_STATS.call(
    "bernoulli.logpmf",
    lambda p: js.stats.bernoulli.logpmf(1, p),
    "near plain",
    domain="unit",
)
_STATS.call(
    "bernoulli.pmf", lambda p: js.stats.bernoulli.pmf(0, p), "near", domain="unit"
)
_STATS.call(
    "bernoulli.cdf", lambda p: js.stats.bernoulli.cdf(0, p), "near", domain="unit"
)
_STATS.call(
    "bernoulli.ppf", lambda q: js.stats.bernoulli.ppf(q, 0.99), "near", domain="unit"
)
_STATS.call(
    "binom.logpmf",
    lambda p: js.stats.binom.logpmf(3, 300, p),
    "near plain",
    domain="unit",
)
_STATS.call("binom.pmf", lambda p: js.stats.binom.pmf(3, 9, p), "near", domain="unit")
_STATS.call(
    "geom.logpmf", lambda p: js.stats.geom.logpmf(3, p), "near plain", domain="unit"
)
_STATS.call("geom.pmf", lambda p: js.stats.geom.pmf(3, p), "near", domain="unit")
_STATS.call(
    "nbinom.logpmf",
    lambda p: js.stats.nbinom.logpmf(3, 300.0, p),
    "near",
    domain="unit",
)
_STATS.call(
    "nbinom.pmf", lambda p: js.stats.nbinom.pmf(3, 3.0, p), "near", domain="unit"
)
_STATS.each(
    "poisson.logpmf poisson.pmf poisson.cdf",
    lambda f, m: f(3, m),
    "plain near",
    domain="positive",
)
_STATS.call("poisson.logpmf", lambda m: js.stats.poisson.logpmf(101, m), "cancelling")
_STATS.call(
    "betabinom.logpmf",
    lambda a, b: js.stats.betabinom.logpmf(3, 9, a, b),
    "plain",
    arity=2,
    domain="positive",
)
_STATS.call(
    "betabinom.pmf",
    lambda a, b: js.stats.betabinom.pmf(3, 9, a, b),
    "plain",
    arity=2,
    domain="positive",
)
_STATS.each(
    "dirichlet.logpdf dirichlet.pdf",
    lambda f, a: f(jax.nn.softmax(a[:, :4], -1).T, jnp.array([1.0, 2.0, 3.0, 4.0])),
    "plain near",
)
_STATS.each(
    "multivariate_normal.logpdf multivariate_normal.pdf",
    lambda f, a: f(a[:, :3], jnp.zeros(3), jnp.eye(3) + 0.5),
    "plain near",
)
_STATS.call(
    "multinomial.logpmf",
    lambda a: js.stats.multinomial.logpmf(
        jnp.array([1, 2, 3]), 6, jax.nn.softmax(a[0, :3])
    ),
    "plain",
)
_STATS.call(
    "multinomial.pmf",
    lambda a: js.stats.multinomial.pmf(
        jnp.array([1, 2, 3]), 6, jax.nn.softmax(a[0, :3])
    ),
    "plain",
)
_STATS.call(
    "gaussian_kde", lambda a, b: js.stats.gaussian_kde(a[0])(b[0]), "plain", arity=2
)
_STATS.call("mode", lambda a: js.stats.mode(a), "ties")
_STATS.call("rankdata", lambda a: js.stats.rankdata(a, axis=1), "ties near cancelling")
_STATS.call("sem", lambda a: js.stats.sem(a, axis=1), "plain cancelling")

_LINALG = Table("scipy.linalg", js.linalg)
_call, _each = _LINALG.call, _LINALG.each
_each("det inv expm", lambda f, a: f(square(a)), "plain near")
_each("cholesky sqrtm", lambda f, a: f(symmetric(a)[0]).real, "plain")
_call(
    "block_diag", lambda a, b: js.linalg.block_diag(a[:4], b[:4]), "integers", arity=2
)
_each(
    "circulant companion fiedler fiedler_companion hankel toeplitz",
    lambda f, a: f(a[0]),
    "plain integers",
)
_call("leslie", lambda a: js.linalg.leslie(a[0], a[1, :-1]), "plain integers")
_call("convolution_matrix", lambda a: js.linalg.convolution_matrix(a[0], 4), "integers")
_call("cho_factor", lambda a: js.linalg.cho_factor(symmetric(a)[0])[0], "plain")
_call(
    "cho_solve",
    lambda a, b: js.linalg.cho_solve(
        js.linalg.cho_factor(symmetric(a)[0]), b.ravel()[:4]
    ),
    "plain",
    arity=2,
)
_call("eigh", lambda a: js.linalg.eigh(symmetric(a))[0], "plain")
_call(
    "eigh_tridiagonal",
    lambda a: js.linalg.eigh_tridiagonal(a[0], a[1, :-1], eigvals_only=True),
    "plain",
)
_call("lu", lambda a: js.linalg.lu(square(a)[0])[1:], "plain near")
_call("lu_factor", lambda a: js.linalg.lu_factor(square(a)[0])[0], "plain near")
_call(
    "lu_solve",
    lambda a, b: js.linalg.lu_solve(js.linalg.lu_factor(square(a)[0]), b.ravel()[:4]),
    "plain",
    arity=2,
)
_call("qr", lambda a: js.linalg.qr(square(a)[0])[1], "plain")
_call(
    "solve",
    lambda a, b: js.linalg.solve(square(a)[0], b.ravel()[:4]),
    "plain near",
    arity=2,
)
_call(
    "solve_triangular",
    lambda a, b: js.linalg.solve_triangular(square(a)[0], b.ravel()[:4]),
    "plain near",
    arity=2,
)
_call("svd", lambda a: js.linalg.svd(symmetric(a))[1], "plain")
_call("polar", lambda a: js.linalg.polar(square(a)[0])[0], "plain")
_call(
    "expm_frechet",
    lambda a, b: js.linalg.expm_frechet(square(a)[0], square(b)[0]),
    "plain",
    arity=2,
)
_call("hessenberg", lambda a: js.linalg.hessenberg(square(a)[0]), "plain")
_call("schur", lambda a: js.linalg.schur(symmetric(a)[0])[0], "plain")
_call(
    "solve_sylvester",
    lambda a, b: (
        js.linalg.solve_sylvester(symmetric(a)[0], symmetric(b)[0], square(a)[1]).real
    ),
    "plain",
    arity=2,
)
_call("funm", lambda a: js.linalg.funm(symmetric(a)[0], jnp.exp).real, "plain")

_SIGNAL = Table("scipy.signal", js.signal)
_call, _each = _SIGNAL.call, _SIGNAL.each
_each(
    "convolve correlate fftconvolve",
    lambda f, a, b: f(a[0], b[0, :5]),
    "plain near",
    arity=2,
)
_each("convolve2d correlate2d", lambda f, a, b: f(a, b[:3, :3]), "plain near", arity=2)
_call("detrend", lambda a: js.signal.detrend(a), "plain")
_call("detrend", lambda a: js.signal.detrend(a, type="constant"), "cancelling plain")
_call("stft", lambda a: js.signal.stft(a.ravel(), nperseg=64)[2], "plain")
_call(
    "istft",
    lambda a: js.signal.istft(js.signal.stft(a.ravel(), nperseg=64)[2], nperseg=64)[1],
    "plain",
)
_call("welch", lambda a: js.signal.welch(a.ravel(), nperseg=64)[1], "plain cancelling")
_call(
    "csd",
    lambda a, b: js.signal.csd(a.ravel(), b.ravel(), nperseg=64)[1],
    "plain",
    arity=2,
)

_OTHER = Table("scipy", js)
_call, _each = _OTHER.call, _OTHER.each
_COORDINATES = np.linspace(0, 1.9, 4096, dtype="f4")
_call(
    "ndimage.map_coordinates",
    lambda a: js.ndimage.map_coordinates(
        a[:3], [jnp.asarray(_COORDINATES), jnp.zeros(4096)], 1
    ),
    "reads",
)
_call(
    "ndimage.map_coordinates",
    lambda a, b: js.ndimage.map_coordinates(
        a, [8 * b.ravel(), b.ravel()], 1, mode="nearest"
    ),
    "near",
    arity=2,
)
_call(
    "integrate.trapezoid",
    lambda a: js.integrate.trapezoid(a, dx=0.1),
    "plain cancelling",
)
for _name in ("dct", "idct", "dctn", "idctn"):
    _call(f"fft.{_name}", getattr(js.fft, _name), "plain cancelling")
_call(
    "interpolate.RegularGridInterpolator",
    lambda a, b: js.interpolate.RegularGridInterpolator(
        (jnp.arange(64.0), jnp.arange(16.0)), a
    )(b.reshape(-1, 2)),
    "near",
    arity=2,
)
_call("cluster.vq.vq", lambda a, b: js.cluster.vq.vq(a, b[:8]), "plain near", arity=2)

_OPS = Table("ops", jax.ops)
_SEGMENTS = np.where(np.arange(4096) % 512 == 0, np.arange(4096) // 512, 0)
_OPS.each(
    "segment_max segment_min segment_sum",
    lambda f, a: f(a.T, _SEGMENTS, 8),
    "long long_ties",
)
_OPS.each(
    "segment_max segment_min segment_sum",
    lambda f, a: f(jnp.tanh(a[:1] * jnp.ones((4096, 1))), _SEGMENTS, 8),
    "reads",
)
_OPS.each(
    "segment_max segment_min segment_sum",
    lambda f, a: f(a, np.arange(64) // 8, 8),
    "cancelling ties",
)
_OPS.call(
    "segment_prod",
    lambda a: jax.ops.segment_prod(a, np.arange(64) // 8, 8),
    "near plain",
)

_IMAGE = Table("image", jax.image)
for _method in ("nearest", "linear", "cubic", "lanczos3"):
    for _size, _kind in ((4, "cancelling"), (4096, "reads")):
        _IMAGE.call(
            "resize",
            lambda a, m=_method, n=_size: jax.image.resize(a[:8], (n, 16), m),
            _kind,
            variant=_method,
        )
_IMAGE.call(
    "scale_and_translate",
    lambda a: jax.image.scale_and_translate(
        a, (32, 8), (0, 1), jnp.array([0.5, 0.5]), jnp.array([0.1, 0.2]), "linear"
    ),
    "plain",
)

CASES = [
    case
    for table in (_SPECIAL, _STATS, _LINALG, _SIGNAL, _OTHER, _OPS, _IMAGE)
    for case in table.cases
]
