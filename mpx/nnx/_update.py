"""`update`: an optimizer's update in place, on good steps only."""

import functools
from typing import Any

import jax
from flax import nnx as _nnx
from jaxtyping import PyTree

from .._base.errors import at_path, describe, differences, listing
from .._base.tree import bool_scalar, path_text, select_tree
from .._base.typing import BoolLike


def update(
    optimizer: _nnx.Optimizer,
    model: PyTree,
    grads: PyTree,
    finite: BoolLike,
    **extra_args: PyTree,
) -> None:
    r"""Updates model and optimizer in place if the step is finite, else skips it.

    A good step equals `optimizer.update(model, grads)`, bit for bit. A skipped one
    leaves the parameters, the optimizer's state and `optimizer.step` unchanged, bit for
    bit.

    Args:
        optimizer: An `nnx.Optimizer`, or a subclass with an `update` of its own.
        model: The model that the optimizer was made for.
        grads: The gradients, from `mpx.nnx.value_and_grad`.
        finite: Whether to apply the step, one boolean, an array or Python's:
            `result.finite`.
        **extra_args: Passed on to `optimizer.update`: `value`, `grad` and `value_fn`
            for L-BFGS.

    Raises:
        TypeError: `optimizer` is not an `nnx.Optimizer`, or `finite` is not a boolean.
        ValueError: The gradients do not match the arrays that the optimizer updates,
            the optimizer was made for another model, or it changed the structure,
            shapes or dtypes of its state.

    Examples:
        >>> import jax.numpy as jnp, mpx.nnx, optax
        >>> from flax import nnx
        >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        >>> grads = nnx.state(model, nnx.Param)
        >>> mpx.nnx.update(optimizer, model, grads, False)
        >>> mpx.nnx.update(optimizer, model, grads, True)
        >>> int(optimizer.step[...])
        1
    """
    call = "`mpx.nnx.update`"
    if not isinstance(optimizer, _nnx.Optimizer):
        raise TypeError(
            f"{call} needs an `nnx.Optimizer`; got {describe(optimizer)}. For an Optax "
            "transformation and its state use `mpx.optimizer_update`."
        )
    good = bool_scalar(finite, f"`finite` of {call}")
    _refuse_gradients(optimizer, model, grads, call)

    nodes = (optimizer, model)
    # On copies: a skipped step must leave both unchanged, and NNX updates in place.
    copies = _nnx.clone(nodes)
    new_optimizer: Any = copies[0]
    is_alone = not isinstance(optimizer, _nnx.ModelAndOptimizer)
    try:
        new_optimizer.update(*copies[1:][:is_alone], grads, **extra_args)
    except Exception:
        _refuse_other_optimizer(optimizer, model, call)
        raise

    form = jax.tree.structure(_nnx.state(nodes))
    before, after = _by_name(_nnx.state(nodes)), _by_name(_nnx.state(copies))
    if before.keys() != after.keys():
        raise ValueError(
            f"{call} cannot undo an update that adds or removes Variables of the "
            "optimizer or the model; added: "
            f"{listing(after.keys() - before.keys()) or 'none'}; removed: "
            f"{listing(before.keys() - after.keys()) or 'none'}. Make all Variables "
            "before the first step."
        )
    # By identity: arrays that the optimizer did not write need no selection.
    changed = {name: new for name, new in after.items() if new is not before[name]}
    chosen = select_tree(good, changed, {name: before[name] for name in changed})
    _nnx.update(nodes, jax.tree.unflatten(form, {**before, **chosen}.values()))


def _by_name(state: object) -> dict[str, Any]:
    """Returns the leaves by names alone: NNX makes other containers dictionaries."""
    name = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {name(path): leaf for path, leaf in leaves}


def _refuse_other_optimizer(optimizer: Any, model: PyTree, call: str) -> None:
    """Raises if the optimizer's state does not fit these weights."""
    try:
        own = jax.eval_shape(optimizer.tx.init, _nnx.state(model, optimizer.wrt))
        wanted, given = (
            {name.removesuffix(".value"): x.shape for name, x in _by_name(tree).items()}
            for tree in (own, _nnx.state(optimizer.opt_state))
        )
    except Exception:  # the first error is more useful
        return
    if found := differences(wanted, given):
        raise ValueError(
            f"`optimizer` of {call} must be made for this model; {found}. Make it for "
            "this model: `nnx.Optimizer(model, tx, wrt=nnx.Param)`."
        )


def _by_path(state: object) -> dict[str, Any]:
    """Returns the leaves of a state by their paths, in order."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {path_text(path): leaf for path, leaf in leaves}


def _refuse_gradients(optimizer: Any, model: PyTree, grads: PyTree, call: str) -> None:
    """Raises unless each updated weight has a gradient of its shape."""
    weights, given = (
        _by_path(_nnx.state(node, optimizer.wrt)) for node in (model, grads)
    )
    found = differences(dict.fromkeys(weights), dict.fromkeys(given))
    if found or not weights:
        raise ValueError(
            f"{call} needs a gradient for each Variable that the optimizer updates "
            f"({len(weights)}, by its `wrt`); {found or 'it updates none'}. Set "
            "`argnums` of `mpx.nnx.value_and_grad` to the filter of the optimizer: "
            "`nnx.DiffState(0, filter)`."
        )
    for name, weight in weights.items():
        if weight.shape != given[name].shape:
            raise ValueError(
                f"{call} needs a gradient of its weight's shape; got "
                f"{describe(given[name])} for {describe(weight)}{at_path(name)}."
            )
