"""The interface of loss scaling, and `scaled`, which applies one to a function."""

import abc
import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, PyTree

from .._base.dtypes import full_precision_of
from .._base.errors import describe
from .._base.tree import Filled, bool_scalar, is_inexact_leaf
from .._base.typing import AnyArray, BoolLike, BoolScalar, FloatScalar
from .._base.wraps import wraps
from .._settings import cast_leaf
from . import _state_dict
from ._state_dict import (
    StepRecord,
    advance_record,
    counted,
    refuse_arithmetic,
    replaced,
    validate_record,
)


class AbstractLossScaling(eqx.Module):
    """The interface of every loss scaling.

    A subclass defines `loss_scale` and, if it changes, how `adjust` changes it;
    `record` contains the counters. Instances are immutable PyTrees of arrays: jit,
    scan, vmap, shard_map, checkpoints, pickle and deepcopy keep every field.
    """

    record: eqx.AbstractVar[StepRecord]

    @property
    @abc.abstractmethod
    def loss_scale(self) -> AnyArray:
        """The scale that the next loss is multiplied by, float32."""

    def adjust(
        self,
        grads_finite: BoolLike,
        *,
        places_finite: Bool[Array, " n"] | None = None,
        loss_finite: BoolLike | None = None,
    ) -> Self:
        """Returns the state after one step: the scale adjusted, the counters advanced.

        Here only the counters change: a changing scale overrides this method.
        `mpx.NoLossScaling(skip=False)` counts nothing and returns itself.

        A loss that was non-finite before it was scaled (bad data, a division by zero)
        is not caused by the scale: such a step is counted, also in `bad_losses`, and
        leaves the scale unchanged.

        Args:
            grads_finite: Whether the step was finite, one boolean.
            places_finite: One boolean for the loss, then one for each leaf of the
                gradients, then optionally one for all else. After a skipped step
                `mpx.check` names the leaves by them.
            loss_finite: Whether the loss was finite before it was scaled, one boolean;
                by default the first one of `places_finite`, or True if that is None,
                too.

        Returns:
            The new state; this one is unchanged.

        Raises:
            TypeError: `grads_finite` or `loss_finite` is not one boolean.
        """
        return self._counted(grads_finite, places_finite, loss_finite)

    @property
    def steps(self) -> AnyArray:
        """The number of counted steps."""
        return self.record.steps

    @property
    def skipped(self) -> AnyArray:
        """The total number of skipped steps."""
        return self.record.skipped

    @property
    def bad_losses(self) -> AnyArray:
        """The number of skipped steps with a loss non-finite before scaling."""
        return self.record.bad_losses

    @property
    def skipped_in_a_row(self) -> AnyArray:
        """The number of skipped steps since the last good one."""
        return self.record.skipped_in_a_row

    @property
    def last_finite(self) -> AnyArray:
        """The number of the last good step, counted from 1; 0 if there was none."""
        return self.record.last_finite

    @property
    def finite(self) -> AnyArray:
        """Whether the last step was good; True before the first."""
        return self.record.finite

    def of_bad_step(self) -> "AbstractLossScaling":
        """Returns the state that the last skipped step had, to replay it: `mpx.blame`.

        It has the loss scale of that step. Scales of recipes are the present ones,
        which a skipped step leaves unchanged: replay before the next good step.

        Returns:
            A loss scaling; this one if no step was skipped, or its scale is unknown.

        Raises:
            ValueError: Called inside jit, where values are unknown.

        Examples:
            >>> import mpx
            >>> scaling = mpx.DynamicLossScaling(8.0).adjust(False)
            >>> float(scaling.loss_scale), float(scaling.of_bad_step().loss_scale)
            (4.0, 8.0)
        """
        if isinstance(self.record.bad_scale, Tracer):
            raise ValueError(
                "`of_bad_step()` of a loss scaling reads values and cannot run "
                "inside jit. Return the scaling from the jitted step and call it "
                "outside."
            )
        scale = self.record.bad_scale
        return self._at_scale(scale) if float(scale) > 0 else self

    def _at_scale(self, scale: FloatScalar) -> "AbstractLossScaling":
        """Returns the state with another scale, within its bounds or not."""
        return self

    def scale(self, tree: PyTree) -> PyTree:
        r"""Multiplies every float or complex leaf by the scale.

        $$y = x \cdot s$$

        in float32 at least, so that $y$ cannot overflow float16.

        Args:
            tree: Any PyTree.

        Returns:
            The tree with the same structure. Half-precision leaves and Python's floats
            are returned as float32, wider and complex dtypes stay. 8-bit formats (the
            state of FP8 recipes) and all other leaves are unchanged.

        Raises:
            TypeError: The tree contains a loss scaling.

        NaN, infinities and zeros are unchanged; a result beyond the range of float32
        is infinite.
        """
        return self._multiplied(tree, "scale", lambda scale: scale)

    def unscale(self, tree: PyTree) -> PyTree:
        r"""Divides every float or complex leaf by the scale, in float32 at least.

        $$y = x \cdot (1 / s)$$

        For a scale that is a power of two this is exact unless the result is
        subnormal.

        Args:
            tree: Any PyTree, such as gradients of the scaled loss.

        Returns:
            The tree with the same structure and the dtypes that `scale` returns.

        Raises:
            TypeError: The tree contains a loss scaling, such as the result of
                `mpx.filter_grad`, whose gradients are unscaled already.

        NaN, infinities and zeros are unchanged.
        """
        return self._multiplied(tree, "unscale", lambda scale: 1 / scale)

    def _multiplied(
        self, tree: PyTree, method: str, factor: Callable[[AnyArray], AnyArray]
    ) -> PyTree:
        """Multiplies a tree by a factor, unless the scale is 1, in full precision."""
        filled = None if self._is_one else Filled(factor(self.loss_scale).astype)

        def one(leaf: object) -> PyTree:
            if isinstance(leaf, AbstractLossScaling):
                raise TypeError(
                    f"`{method}` of a loss scaling needs losses or gradients; got a "
                    f"tree with a loss scaling in it, {type(leaf).__name__}. The "
                    "results of `mpx.filter_grad` and the like are already "
                    "unscaled: use `result.value` and `result.grads` unchanged."
                )
            return _to_full(leaf) if filled is None else _multiply(leaf, filled)

        return jax.tree.map(
            one, tree, is_leaf=lambda node: isinstance(node, AbstractLossScaling)
        )

    @property
    def _is_stateful(self) -> bool:
        """Whether steps are checked and counted, so that the state changes."""
        return True

    @property
    def _by_loss(self) -> bool:
        """Whether the loss alone decides about a step."""
        return False

    @property
    def _is_one(self) -> bool:
        """Whether the scale is constantly 1."""
        return False

    def with_loss(self, loss: "AbstractLossScaling") -> "AbstractLossScaling":
        """Returns this state with another loss scaling; the state of recipes is kept.

        Args:
            loss: The loss scaling, which brings its own counters.

        Returns:
            `loss` itself, or, if there is a state of recipes, the
            `mpx.quantization.RecipeScaling` with `loss` in it.

        Raises:
            TypeError: `loss` is not a loss scaling, or contains a state of recipes
                itself.

        Examples:
            >>> import jax, jax.numpy as jnp, mpx
            >>> layer = mpx.autocast(jnp.dot, jnp.float16, weights=1)
            >>> x = jax.ShapeDtypeStruct((4, 4), "float32")
            >>> scaling = mpx.init_scaling(layer, x, x)
            >>> scaling = scaling.with_loss(mpx.StaticLossScaling(128.0))
            >>> float(scaling.loss_scale)
            128.0
        """
        if not isinstance(loss, AbstractLossScaling) or loss._tokens():
            raise TypeError(
                f"`with_loss(loss)` of `{type(self).__name__}` needs a loss "
                f"scaling without a state of recipes; got {type(loss).__name__}. For "
                "a `mpx.quantization.RecipeScaling` pass its `.loss`."
            )
        return self._with_loss(loss)

    def with_state(
        self, state: "Mapping[str, Any] | AbstractLossScaling", *, strict: bool = True
    ) -> "AbstractLossScaling":
        """Returns this scaling with the state of another run, also of another recipe.

        For a run that changes its precision or recipe: `scaling =
        mpx.init_scaling(new_func, model, ...).with_state(scaling)`. The counters
        continue, and so does the number of the step, which stochastic rounding draws
        its noise by. The loss scaling continues, too, unless only the new one has a
        scale, or the old one checks only the loss, which the new recipe does not allow.

        Args:
            state: The scaling of the earlier function, or its `state_dict()`.
            strict: See `mpx.quantization.RecipeScaling.with_state`.

        Returns:
            The scaling; a `mpx.quantization.RecipeScaling` if `state` has scales of
            recipes, which it keeps for a later change back.

        Raises:
            TypeError: `state` is neither of these.
            ValueError: It is incomplete, of a later version, or contains values that no
                run can reach.

        Examples:
            >>> import mpx
            >>> old = mpx.NoLossScaling().adjust(True)
            >>> new = mpx.DynamicLossScaling(8.0).with_state(old)
            >>> int(new.steps), float(new.loss_scale)
            (1, 8.0)
        """
        if isinstance(state, AbstractLossScaling):
            state = state.state_dict()
        kind = str(state.get("kind")) if isinstance(state, Mapping) else ""
        known = _state_dict.kinds(AbstractLossScaling)
        return known.get(kind, type(self))._carried(self, state, strict)

    @classmethod
    def _carried(
        cls, new: "AbstractLossScaling", state: Mapping[str, Any], strict: bool
    ) -> "AbstractLossScaling":
        """Returns a loss scaling with a state that was written by this class."""
        old = AbstractLossScaling.from_state_dict(state)
        return new._with_record(old.record) if old._is_one > new._is_one else old

    def _with_loss(self, loss: "AbstractLossScaling") -> "AbstractLossScaling":
        """Implements `with_loss` for a checked loss scaling."""
        return loss

    def resumed(self) -> Self:
        """Returns the state of a halted run such that steps are applied again.

        `mpx.optimizer_step` halts after `max_skipped_in_a_row` skipped steps, and then
        changes nothing, not even after a restart. Call this once the cause is fixed.
        The count of steps skipped in a row restarts at 0; everything else is unchanged.
        """
        record = self.record
        none = jnp.zeros_like(record.skipped_in_a_row)
        going = jnp.zeros_like(record.halted)
        return self._with_record(replaced(record, halted=going, skipped_in_a_row=none))

    def amaxes_by_weight(self) -> dict[str, Array]:
        """Returns the newest amaxes of recipes by weight; here there are none."""
        return {}

    # The methods for recipes. Without recipes they do nothing, so a step need not
    # distinguish the classes of its scaling.

    def _tokens(self) -> dict[Any, Array]:
        """Returns the scales of recipes; a step's derivative by them is the amaxes."""
        return {}

    def _provide(
        self, tokens: Mapping[Any, Array]
    ) -> contextlib.AbstractContextManager[None]:
        """Gives functions called inside, in a training step, the scales of recipes."""
        return contextlib.nullcontext()

    def _provide_frozen(self) -> contextlib.AbstractContextManager[None]:
        """Gives functions called inside the scales, without learning from the call."""
        return contextlib.nullcontext()

    def _gathered(self, amaxes: Mapping[Any, Array]) -> tuple[Array, ...]:
        """Returns the amaxes of a derivative as one array for each recipe."""
        return ()

    def _observe(self, amaxes: tuple[Array, ...]) -> Self:
        """Returns the state with the amaxes of the step."""
        return self

    def _counted(
        self,
        grads_finite: BoolLike,
        places_finite: Bool[Array, " n"] | None,
        loss_finite: BoolLike | None = None,
    ) -> Self:
        """Returns the state with advanced counters and an unchanged scale."""
        if not self._is_stateful:
            return self
        finite, loss_finite = judged(self, grads_finite, loss_finite)
        record = advance_record(
            self.record, finite, places_finite, loss_finite, self.loss_scale
        )
        return self._with_record(record)

    def _set_aside(self) -> Self:
        """Returns the state after a step that the user skips: only counted."""
        record = self.record
        names = ("steps", "skipped", "skipped_in_a_row")
        more = {name: counted(getattr(record, name)) for name in names}
        bad = jnp.zeros_like(record.finite)
        return self._with_record(replaced(record, **more, finite=bad))

    def _with_record(self, record: StepRecord) -> Self:
        """Returns the state with other counters."""
        return replaced(self, record=record)

    def _backed_off(self) -> Self:
        """Returns the state for another try of the same step at a smaller scale."""
        raise ValueError(
            f"`retries` needs a scale that can fall; got {type(self).__name__}. Use "
            "`mpx.DynamicLossScaling`, or omit `retries`."
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns all fields as numpy values by name, with kind and version number."""
        return _state_dict.write_state(self)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        """Rebuilds a loss scaling from `state_dict()`; it continues bit for bit.

        Older versions are migrated: the fields of the published MPX package (no
        version) and every version of mpx.

        Args:
            state: The dictionary from `state_dict()`; values may be any array that
                numpy reads, with leading axes where several states are stacked.

        Returns:
            A loss scaling of this class, or of the subclass that the state names.

        Raises:
            TypeError: `state` is not a mapping.
            ValueError: The state is empty, incomplete, unknown, of another kind or a
                later version, or contains dtypes, shapes or values that no run can
                reach.
        """
        return _state_dict.read(cls, state)

    @classmethod
    def _template(cls) -> Self:
        """Returns an instance with the fields that a state dictionary fills."""
        with_scale: Any = cls
        has_scale = "loss_scaling" in cls.__annotations__
        return with_scale(1.0) if has_scale else with_scale()

    def _validate(self) -> None:
        """Raises `ValueError` for values that no run can reach."""
        validate_record(self.record, type(self))
        odd = self._odd_scale()
        if odd is not None:
            raise ValueError(
                f"the loss scale of `{type(self).__name__}` must be float32; got "
                f"{describe(odd)}."
            )

    def _odd_scale(self) -> AnyArray | None:
        """Returns a non-float32 scale, which a cast or wrong restore makes, or None."""
        own = () if self._is_one else (self.loss_scale,)
        scales = (*own, self.record.bad_scale)
        return next((x for x in scales if x.dtype != np.float32), None)

    def _why_stuck(self) -> str | None:
        """Returns why all later steps will fail, for `mpx.check`; None if not known."""
        try:
            self._validate()
        except ValueError as error:
            return str(error).removesuffix(".")
        return None

    def __reduce__(self) -> Any:
        return _state_dict.read, (type(self), self.state_dict())

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        # The state dict would need concrete values.
        return jax.tree.map(lambda x: jnp.copy(x) if eqx.is_array(x) else x, self)


def judged(
    owner: AbstractLossScaling, grads_finite: BoolLike, loss_finite: BoolLike | None
) -> tuple[BoolScalar, BoolScalar | None]:
    """Checks and converts the arguments of `adjust`."""
    call = f"of `{type(owner).__name__}.adjust`"
    refuse_arithmetic(owner.record, f"`self` {call}")
    finite = bool_scalar(grads_finite, f"`grads_finite` {call}")
    if loss_finite is None:
        return finite, None
    return finite, bool_scalar(loss_finite, f"`loss_finite` {call}")


def _to_full(leaf: Any) -> Any:
    if not is_inexact_leaf(leaf):
        return leaf
    if leaf.dtype == np.float32:  # as gradients are
        return leaf
    return cast_leaf(leaf, full_precision_of(leaf.dtype))


def _multiply(leaf: object, scale: Filled) -> PyTree:
    if isinstance(leaf, float | complex) and not isinstance(leaf, np.generic):
        leaf = jnp.asarray(leaf)
    if not is_inexact_leaf(leaf):
        return leaf
    wide = _to_full(leaf)
    if not isinstance(wide, jax.Array):
        wide = jnp.asarray(wide)
    if jnp.issubdtype(wide.dtype, jnp.complexfloating):
        # In a complex product, infinity times the zero imaginary part is NaN.
        factor = scale.like(wide.real)
        return jax.lax.complex(wide.real * factor, wide.imag * factor)
    # The primitive: tracing the operator takes several times as long.
    return jax.lax.mul(wide, scale.like(wide))


# --- `scaled`: a function whose result is multiplied by the scale ---------------------


def scaled(
    func: Callable[..., PyTree], scaling: AbstractLossScaling, has_aux: bool = False
) -> Callable[..., PyTree]:
    """Wraps a function to multiply its result by the loss scale.

    Args:
        func: A function that returns a value or a PyTree of values.
        scaling: The loss scaling to multiply by.
        has_aux: `func` returns `(value, aux)`, of which only `value` is scaled.

    Returns:
        The function; half-precision values are returned as float32, see
        `AbstractLossScaling.scale`.

    Raises:
        TypeError: `scaling` is not a loss scaling or `func` is not callable; or, at the
            call, `has_aux` is True and `func` did not return a pair.

    Examples:
        >>> import jax.numpy as jnp, mpx
        >>> float(mpx.scaled(jnp.sum, mpx.StaticLossScaling(8.0))(jnp.ones(2)))
        16.0
    """
    if not isinstance(scaling, AbstractLossScaling):
        raise TypeError(
            "`scaling` of `mpx.scaled(func, scaling)` must be a loss scaling; got "
            f"{describe(scaling)}. Wrap a number: `mpx.StaticLossScaling(number)`."
        )
    if not callable(func):
        raise TypeError(
            "`func` of `mpx.scaled(func, scaling)` must be a function; got "
            f"{describe(func)}. To scale a value: `scaling.scale(value)`."
        )

    @wraps(func)
    def wrapper(*args: PyTree, **kwargs: PyTree) -> PyTree:
        if not has_aux:
            return scaling.scale(func(*args, **kwargs))
        result = func(*args, **kwargs)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(
                "With `has_aux=True` the function passed to `mpx.scaled` must "
                f"return `(value, aux)`; got {describe(result)}."
            )
        return scaling.scale(result[0]), result[1]

    return wrapper
