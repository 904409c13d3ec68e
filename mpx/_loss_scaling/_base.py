"""The interface of loss scaling, and the two forms whose scale never changes."""

import abc
from collections.abc import Callable, Mapping
from typing import Any, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float32, PyTree

from .._cast import cast_leaf
from .._dtypes import full_precision_of
from .._errors import describe
from .._tree import Filled, bool_scalar, is_inexact_leaf
from .._typing import BoolLike, BoolScalar, FloatScalar, ScalarLike
from .._wraps import wraps
from . import _state_dict
from ._record import StepRecord, replaced

# A scale and its inverse must both be normal float32 numbers: XLA may flush subnormal
# ones to zero, and dividing a gradient by a flushed number destroys it.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**126


class AbstractLossScaling(eqx.Module):
    """The interface of every loss scaling.

    A subclass says what `loss_scale` is and how `adjust` changes it; `record` holds the
    counters. Instances are immutable PyTrees of arrays: they go through jit, scan,
    vmap, shard_map, checkpoints, pickle and deepcopy with every field.
    """

    record: eqx.AbstractVar[StepRecord]

    @property
    @abc.abstractmethod
    def loss_scale(self) -> FloatScalar:
        """The scale that the next loss is multiplied by, float32."""

    @abc.abstractmethod
    def adjust(
        self,
        grads_finite: BoolLike,
        *,
        places_finite: Bool[Array, " n"] | None = None,
    ) -> Self:
        """The state after one step: the scale adjusted, the counters advanced.

        Args:
            grads_finite: Whether the step was good, one boolean.
            places_finite: One boolean for the loss, then one for each leaf of the
                gradients; after a bad step `mpx.check` names the leaves by them.

        Returns:
            The new state; this one stays as it is.

        Raises:
            TypeError: `grads_finite` is not one boolean.
        """

    @property
    def steps(self) -> Any:
        """How many steps were counted."""
        return self.record.steps

    @property
    def skipped(self) -> Any:
        """How many steps were skipped in all."""
        return self.record.skipped

    @property
    def skipped_in_a_row(self) -> Any:
        """How many of the latest steps were skipped without a good one between."""
        return self.record.skipped_in_a_row

    @property
    def last_finite(self) -> Any:
        """The number of the last good step, counted from 1; 0 if there was none."""
        return self.record.last_finite

    @property
    def finite(self) -> Any:
        """Whether the last step was good; True before the first."""
        return self.record.finite

    def scale(self, tree: PyTree) -> PyTree:
        r"""Multiplies every float or complex leaf by the scale.

        $$y = x \cdot s$$

        in float32 at least, so that the product cannot overflow float16.

        Args:
            tree: Any PyTree.

        Returns:
            The tree with the same structure. Half-precision leaves and Python's floats
            come back as float32, wider and complex dtypes stay. Formats of 8 bits (the
            state of FP8 recipes) and all other leaves stay as they are.

        Raises:
            TypeError: The tree holds a loss scaling.

        NaN, infinities and zeros stay what they are; a product beyond the range of
        float32 is infinite.
        """
        scale = Filled(self.loss_scale.astype)
        return _map_numbers(lambda leaf: _multiply(leaf, scale), tree, "scale")

    def unscale(self, tree: PyTree) -> PyTree:
        r"""Divides every float or complex leaf by the scale, in float32 at least.

        $$y = x \cdot (1 / s)$$

        For a scale that is a power of two this is exact unless the result is
        subnormal.

        Args:
            tree: Any PyTree, such as gradients of the scaled loss.

        Returns:
            The tree with the same structure and the dtypes that `scale` gives.

        Raises:
            TypeError: The tree holds a loss scaling, such as the result of
                `mpx.filter_grad`, whose gradients are unscaled already.

        NaN, infinities and zeros stay what they are.
        """
        inverse = Filled((1 / self.loss_scale).astype)
        return _map_numbers(lambda leaf: _multiply(leaf, inverse), tree, "unscale")

    @property
    def _is_stateful(self) -> bool:
        """Whether steps are checked and counted, so that the state changes."""
        return True

    def _counted(
        self, grads_finite: BoolLike, places_finite: Bool[Array, " n"] | None
    ) -> Self:
        """The state with its counters advanced and the scale as it is."""
        finite = finite_scalar(grads_finite, self)
        return self._with_record(self.record.updated(finite, places_finite))

    def _with_record(self, record: StepRecord) -> Self:
        """The state with other counters."""
        return replaced(self, record=record)

    def _backed_off(self) -> Self:
        """The state for one more try of the same step at a smaller scale."""
        raise ValueError(
            f"`retries` needs a scale that can fall; got {type(self).__name__}. Use "
            "`mpx.DynamicLossScaling`, or leave `retries` out."
        )

    def state_dict(self) -> dict[str, Any]:
        """All fields as numpy values by name, with the kind and a version number."""
        return _state_dict.write(self)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        """Rebuilds a loss scaling from `state_dict()`; it continues bit for bit.

        Older versions are migrated: the fields of the published MPX package (no
        version) and every version of mpx.

        Args:
            state: What `state_dict()` returned; values may be any array that numpy
                reads, with leading axes where several states are stacked.

        Returns:
            A loss scaling of this class, or of the subclass that the state names.

        Raises:
            TypeError: `state` is no mapping.
            ValueError: The state is empty, incomplete, unknown, of another kind or a
                later version, or holds dtypes, shapes or values that no run can reach.
        """
        return _state_dict.read(cls, state)

    @classmethod
    def _template(cls) -> Self:
        """An instance with the fields that a state dictionary fills."""
        with_scale: Any = cls
        has_scale = "loss_scaling" in cls.__annotations__
        return with_scale(1.0) if has_scale else with_scale()

    def _validate(self) -> None:
        """Raises `ValueError` for values that no run can reach."""

    def __reduce__(self) -> Any:
        return _state_dict.read, (type(self), self.state_dict())

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # Not through the state dict, which needs concrete values.
        copy = lambda x: jnp.copy(x) if eqx.is_array(x) else x  # noqa: E731
        return jax.tree.map(copy, self)


class StaticLossScaling(AbstractLossScaling):
    """A scale that never changes; steps that are not finite are still skipped.

    Args:
        loss_scaling: A positive number, kept as float32. Best a power of two: others
            round each gradient once more.

    Raises:
        ValueError: It is not one finite positive number between 2^-126 and 2^126.

    Examples:
        >>> import mpx
        >>> float(mpx.StaticLossScaling(1024.0).loss_scale)
        1024.0
    """

    loss_scaling: Float32[Array, ""]
    record: StepRecord

    def __init__(self, loss_scaling: ScalarLike) -> None:
        self.loss_scaling = scale_value(loss_scaling, "loss_scaling", type(self))
        self.record = StepRecord()

    @property
    def loss_scale(self) -> FloatScalar:
        """The scale, float32."""
        return self.loss_scaling

    def adjust(
        self,
        grads_finite: BoolLike,
        *,
        places_finite: Bool[Array, " n"] | None = None,
    ) -> Self:
        """Advances the counters; the scale stays. See `AbstractLossScaling.adjust`."""
        return self._counted(grads_finite, places_finite)

    def _validate(self) -> None:
        scale_in_range(np.asarray(self.loss_scaling), "loss_scaling", type(self))


class NoLossScaling(AbstractLossScaling):
    """The state of a training step that needs no scale: bfloat16, float32.

    Args:
        skip: Whether steps that are not finite are skipped and counted. With False
            nothing is checked, the compiled step holds no trace of it, and the state
            never changes.

    Raises:
        TypeError: `skip` is not True or False; an array will not do, because it must
            be known when the step is traced.

    Examples:
        >>> import mpx
        >>> float(mpx.NoLossScaling().loss_scale)
        1.0
    """

    record: StepRecord
    skip: bool = eqx.field(static=True)

    def __init__(self, skip: bool = True) -> None:
        if not isinstance(skip, bool):
            raise TypeError(
                "`skip` of `mpx.NoLossScaling` must be True or False, known when the "
                f"step is traced; got {describe(skip)}."
            )
        self.record = StepRecord()
        self.skip = skip

    @property
    def loss_scale(self) -> FloatScalar:
        """One, float32."""
        return jnp.ones((), jnp.float32)

    def scale(self, tree: PyTree) -> PyTree:
        """Casts half-precision leaves to float32, as every `scale` does."""
        return _map_numbers(_to_full, tree, "scale")

    def unscale(self, tree: PyTree) -> PyTree:
        """Casts half-precision leaves to float32, as every `unscale` does."""
        return _map_numbers(_to_full, tree, "unscale")

    def adjust(
        self,
        grads_finite: BoolLike,
        *,
        places_finite: Bool[Array, " n"] | None = None,
    ) -> Self:
        """Advances the counters; with `skip=False` returns itself.

        See `AbstractLossScaling.adjust`.
        """
        return self._counted(grads_finite, places_finite)

    @property
    def _is_stateful(self) -> bool:
        return self.skip

    def _counted(
        self, grads_finite: BoolLike, places_finite: Bool[Array, " n"] | None
    ) -> Self:
        if not self.skip:
            return self
        return super()._counted(grads_finite, places_finite)


def scaled(
    func: Callable[..., Any], scaling: AbstractLossScaling, has_aux: bool = False
) -> Callable[..., Any]:
    """Makes a function whose result is multiplied by the scale.

    Args:
        func: A function that returns a value or a PyTree of values.
        scaling: The loss scaling to multiply by.
        has_aux: `func` returns `(value, aux)`, of which only `value` is scaled.

    Returns:
        The function; half-precision values come back as float32, see
        `AbstractLossScaling.scale`.

    Raises:
        TypeError: `scaling` is no loss scaling or `func` cannot be called; or, at the
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
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not has_aux:
            return scaling.scale(func(*args, **kwargs))
        result = func(*args, **kwargs)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(
                "With `has_aux=True` the function given to `mpx.scaled` must return "
                f"`(value, aux)`; got {describe(result)}."
            )
        return scaling.scale(result[0]), result[1]

    return wrapper


def scale_value(value: ScalarLike, name: str, owner: type) -> FloatScalar:
    """Reads a scale that a user gave, as a float32 scalar of its own."""
    return number(value, name, owner, jnp.float32, scale_in_range)


def number(
    value: Any, name: str, owner: type, dtype: Any, validate: Callable[..., None]
) -> Array:
    """Reads one number that a user gave; values are checked unless they are traced."""
    is_array = isinstance(value, jax.Array | np.ndarray | np.generic)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number or (is_array and jnp.issubdtype(value.dtype, np.number))) or (
        is_array
        and (value.ndim != 0 or jnp.issubdtype(value.dtype, np.complexfloating))
    ):
        raise ValueError(
            f"`{name}` of `mpx.{owner.__name__}` must be one real number; got "
            f"{describe(value)}."
        )
    if not isinstance(value, Tracer):
        validate(np.asarray(value, np.float64), name, owner)
    # A copy: the state's buffers may be donated, the user's must survive that.
    return jnp.array(value, dtype, copy=True)


def scale_in_range(value: np.ndarray, name: str, owner: type) -> None:
    """Refuses a scale that is not finite and positive, with a normal inverse."""
    if not np.all((value >= SMALLEST_SCALE) & (value <= LARGEST_SCALE)):
        raise ValueError(
            f"`{name}` of `mpx.{owner.__name__}` must be a positive, finite scale "
            "between 2^-126 and 2^126, so that it and its inverse are normal float32 "
            f"numbers; got {value}."
        )


def finite_scalar(grads_finite: BoolLike, owner: AbstractLossScaling) -> BoolScalar:
    """Reads the argument of `adjust`."""
    name = type(owner).__name__
    return bool_scalar(grads_finite, f"`grads_finite` of `mpx.{name}.adjust`")


def _map_numbers(func: Callable[[Any], Any], tree: PyTree, method: str) -> PyTree:
    """Maps over a tree that must not hold a loss scaling, whose fields are no values.

    The results of the gradient functions hold one; their gradients are unscaled.
    """

    def apply(leaf: Any) -> Any:
        if not isinstance(leaf, AbstractLossScaling):
            return func(leaf)
        raise TypeError(
            f"`{method}` of a loss scaling takes losses or gradients; got a tree with "
            f"a loss scaling in it, {type(leaf).__name__}. What `mpx.filter_grad` and "
            "its relatives return is unscaled already: use `result.value` and "
            "`result.grads` as they are."
        )

    return jax.tree.map(
        apply, tree, is_leaf=lambda node: isinstance(node, AbstractLossScaling)
    )


def _to_full(leaf: Any) -> Any:
    if not is_inexact_leaf(leaf):
        return leaf
    return cast_leaf(leaf, full_precision_of(leaf.dtype))


def _multiply(leaf: Any, scale: Filled) -> Any:
    if isinstance(leaf, float | complex) and not isinstance(leaf, np.generic):
        leaf = jnp.asarray(leaf)
    if not is_inexact_leaf(leaf):
        return leaf
    wide = _to_full(leaf)
    if not isinstance(wide, jax.Array):
        wide = jnp.asarray(wide)
    if jnp.issubdtype(wide.dtype, jnp.complexfloating):
        # Not a complex product, in which infinity times the zero imaginary part is NaN.
        factor = scale.like(wide.real)
        return jax.lax.complex(wide.real * factor, wide.imag * factor)
    # The primitive itself: the operator takes several times as long to trace.
    return jax.lax.mul(wide, scale.like(wide))
