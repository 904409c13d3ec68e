"""What a gradient function returns: a tuple in the paper's order, with names."""

from collections.abc import Iterable
from typing import Any

import jax
from jaxtyping import PyTree

from .._tree import bool_scalar, select_tree
from .._typing import BoolLike


class GradientResult(tuple):
    """The result of a gradient function; unpacks like the tuple of the paper.

    | function | unpacks to |
    |---|---|
    | `filter_grad`, `grad` | `scaling, finite, grads` |
    | the same with `has_aux=True` | `scaling, finite, grads, aux` |
    | `filter_value_and_grad`, `value_and_grad` | `value, scaling, finite, grads` |
    | the same with `has_aux=True` | `(value, aux), scaling, finite, grads` |

    It also contains what `mpx.optimizer_step` needs to check the step again: the
    previous state, and which leaves were finite. It is a PyTree.

    Attributes:
        value: The unscaled loss, float32 at least; only from functions that return it.
        aux: The second result of the loss function; only with `has_aux=True`.
        scaling: The loss scaling for the next step.
        finite: Whether loss and gradients are finite, a boolean scalar array.
        grads: The unscaled gradients, float32 at least; meaningless where `finite` is
            False.
    """

    _fields: tuple[str, ...]
    _parts: dict[str, Any]

    def __new__(cls, **parts: object) -> "GradientResult":
        has_value, has_aux = "value" in parts, "aux" in parts
        common = (parts["scaling"], parts["finite"], parts["grads"])
        if has_value and has_aux:
            items = ((parts["value"], parts["aux"]), *common)
        elif has_value:
            items = (parts["value"], *common)
        else:
            items = (*common, parts["aux"]) if has_aux else common
        self = super().__new__(cls, items)
        self._parts = parts
        self._fields = tuple(name for name in parts if not name.startswith("_"))
        return self

    def __getattr__(self, name: str) -> PyTree:
        # Only asked for what is not there in the ordinary way.
        # As it is copied or unpickled there are none yet, and asking for them would ask
        # again.
        parts = self.__dict__.get("_parts", {})
        if name in parts:
            return parts[name]
        if name == "value":
            raise AttributeError(
                "This result has no `value`; use `mpx.filter_value_and_grad` (or "
                "`mpx.value_and_grad`) instead of `mpx.filter_grad`."
            )
        if name == "aux":
            raise AttributeError(
                "This result has no `aux`; build the gradient function with "
                "`has_aux=True`."
            )
        raise AttributeError(f"`mpx.GradientResult` has no attribute {name!r}.")

    def _replace(self, **changes: Any) -> "GradientResult":
        """A copy with other parts, as named tuples have it.

        With `finite=False` the user skips a step that was good: weights and optimizer
        stay, and the scaling counts a skipped step and learns nothing of it, no
        overflow and no amax. A step that was bad stays so.
        """
        unknown = changes.keys() - self._parts.keys()
        if unknown:
            raise ValueError(
                f"`_replace` needs fields of {', '.join(self._fields)}; got "
                f"{sorted(unknown)}."
            )
        parts = {**self._parts, **changes}
        if "finite" in changes:
            wanted = bool_scalar(changes["finite"], "`finite` of `result._replace`")
            parts["_aside"] = self._parts.get("_aside", False) | (self.finite & ~wanted)
            parts["finite"] = self.finite & wanted
            if "scaling" not in changes:
                parts["scaling"] = _aside(parts["_aside"], self._before, self.scaling)
        return GradientResult(**parts)

    def _judged(self, finite: BoolLike, flags: object) -> Any:
        """The scaling after this step, had it come out as `finite`."""
        before = self._before
        if before is None:
            return None
        if "_counted" in self._parts:
            # Full precision: steps are counted, the scale is not used and not changed.
            after = before._counted(finite, flags)
        else:
            after = before.adjust(finite, places_finite=flags)
        return _aside(self._parts.get("_aside", False), before, after)

    @property
    def _before(self) -> Any:
        """The scaling from before this step."""
        return self._parts["_counted" if "_counted" in self._parts else "_scaled"]

    def __repr__(self) -> str:
        inner = ", ".join(f"{name}={self._parts[name]!r}" for name in self._fields)
        return f"GradientResult({inner})"

    # A tuple would be made again of its items, which have no names.
    def __reduce__(self) -> tuple:
        return _unflatten, (tuple(self._parts), tuple(self._parts.values()))


def _aside(is_aside: Any, before: Any, after: Any) -> Any:
    """The scaling after a step that the user has skipped, where he has."""
    if is_aside is False or before is None:
        return after
    return select_tree(is_aside, before._set_aside(), after)


def _flatten_with_keys(
    result: GradientResult,
) -> tuple[list[tuple[object, PyTree]], tuple[str, ...]]:
    parts = result._parts
    return [(jax.tree_util.GetAttrKey(k), v) for k, v in parts.items()], tuple(parts)


def _unflatten(names: tuple[str, ...], children: Iterable[PyTree]) -> GradientResult:
    return GradientResult(**dict(zip(names, children, strict=True)))


jax.tree_util.register_pytree_with_keys(GradientResult, _flatten_with_keys, _unflatten)
