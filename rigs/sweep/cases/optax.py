"""Losses of Optax."""

import jax
import numpy as np
from optax import losses

from rigs.sweep.cases.table import Table

_TABLE = Table("optax", losses)
_add, _call, _each = _TABLE.add, _TABLE.call, _TABLE.each
_LABELS = np.arange(64) % 16
_SOFT = (np.eye(16)[_LABELS] * 0.9 + 0.1 / 16).astype("f4")
_HARD = np.where(np.arange(1024).reshape(64, 16) % 3, 1.0, 0.0).astype("f4")

_add("l2_loss squared_error huber_loss log_cosh", "plain cancelling near", arity=2)
_add("cosine_distance cosine_similarity", "plain cancelling near", arity=2)
_add("hinge_loss perceptron_loss", "plain ties", arity=2)
_each(
    "binary_dice_loss sigmoid_binary_cross_entropy sparsemax_loss",
    lambda f, a: f(a, _HARD),
    "plain near",
)
_call(
    "sigmoid_binary_cross_entropy",
    lambda a: losses.sigmoid_binary_cross_entropy(a + 6, _HARD),
    "plain ties",
)
_call("sigmoid_focal_loss", lambda a: losses.sigmoid_focal_loss(a, _HARD), "plain near")
_call(
    "sigmoid_focal_loss",
    lambda a: losses.sigmoid_focal_loss(a + 6, _HARD, alpha=0.25),
    "plain",
)
_each(
    "dice_loss multiclass_generalized_dice_loss",
    lambda f, a: f(a.reshape(4, 16, 16), _SOFT.reshape(4, 16, 16)),
    "plain near",
)
_KL = "convex_kl_divergence generalized_kl_divergence kl_divergence"
_each(
    _KL,
    lambda f, a, b: f(jax.nn.log_softmax(a), jax.nn.softmax(b)),
    "plain near",
    arity=2,
)
_each(
    _KL,
    lambda f, a, b: f(jax.nn.log_softmax(a), jax.nn.softmax(a + 0.01 * b)),
    "plain",
    arity=2,
    variant="close",
)
_call(
    "kl_divergence_with_log_targets",
    lambda a, b: losses.kl_divergence_with_log_targets(
        jax.nn.log_softmax(a), jax.nn.log_softmax(b)
    ),
    "plain near cancelling",
    arity=2,
)
_each(
    "multiclass_hinge_loss multiclass_perceptron_loss"
    " softmax_cross_entropy_with_integer_labels",
    lambda f, a: jax.vmap(f)(a, _LABELS),
    "plain near cancelling",
)
_each(
    "softmax_cross_entropy safe_softmax_cross_entropy",
    lambda f, a: f(a, _SOFT),
    "plain near cancelling",
)
_each(
    "poly_loss_cross_entropy ranking_softmax_loss",
    lambda f, a: f(a, _SOFT),
    "plain near",
)
_call("ntxent", lambda a: losses.ntxent(a, _LABELS), "plain near")
_call("smooth_labels", lambda a: losses.smooth_labels(a, 0.01), "plain cancelling")
_add("triplet_margin_loss", "plain cancelling", arity=3)
_call(
    "make_fenchel_young_loss",
    lambda a: losses.make_fenchel_young_loss(jax.nn.logsumexp)(a, _SOFT),
    "plain cancelling",
)
_call(
    "multiclass_sparsemax_loss",
    lambda a: losses.multiclass_sparsemax_loss(a, _LABELS),
    "plain near cancelling",
)
_PADDING, _TARGETS = np.zeros((4, 16), "f4"), np.arange(1, 13).reshape(4, 3)
_each(
    "ctc_loss ctc_loss_with_forward_probs",
    lambda f, a: f(a.reshape(4, 16, 16), _PADDING, _TARGETS, np.zeros((4, 3), "f4")),
    "plain near",
)

CASES = _TABLE.cases
