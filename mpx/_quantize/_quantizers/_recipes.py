"""Recipes: which quantizer inputs, weights and gradients of a linear layer get.

A linear layer has three matmuls: the output y = x w, the gradient of its input dx = g
wᵀ, and the gradient of its weight dw = xᵀ g: its *legs* forward, dgrad and wgrad. A
recipe gives a quantizer to each *role* in them: the input x, the weight w, and the
gradient g of the output. The names and defaults are Transformer Engine's.

A recipe is a frozen dataclass of options, without arrays: hashable and a constant to
`jax.jit`. This module has those that compute scales from the current array;
`DelayedScaling`, which has a state, is in `_delayed`.
"""

import abc
import dataclasses
import enum
import inspect
from collections.abc import Callable
from typing import ClassVar

from .._formats._format import Format, check_epsilon, check_flags
from ._casting import AbstractKernel
from ._kinds import (
    BlockQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)

_OVERRIDES = (None, "high_precision", "dequantized")


class Role(enum.Enum):
    """The role of an array in a linear layer.

    Examples:
        >>> import mpx
        >>> [role.name for role in mpx.quantization.Role]
        ['INPUT', 'WEIGHT', 'GRADIENT']
    """

    INPUT = "input"
    """The input x of the layer."""
    WEIGHT = "weight"
    """Its weight w."""
    GRADIENT = "gradient"
    """The gradient g of its output."""

    def __repr__(self) -> str:
        return f"<Role.{self.name}>"


class Leg(enum.Enum):
    """One of the three matmuls of a linear layer.

    Examples:
        >>> import mpx
        >>> [leg.name for leg in mpx.quantization.Leg]
        ['FORWARD', 'DGRAD', 'WGRAD']
    """

    FORWARD = "forward"
    """The output, y = x w."""
    DGRAD = "dgrad"
    """The gradient of the input, dx = g wᵀ."""
    WGRAD = "wgrad"
    """The gradient of the weight, dw = xᵀ g."""

    def __repr__(self) -> str:
        return f"<Leg.{self.name}>"


LEGS = {
    Role.INPUT: (Leg.FORWARD, Leg.WGRAD),
    Role.WEIGHT: (Leg.FORWARD, Leg.DGRAD),
    Role.GRADIENT: (Leg.DGRAD, Leg.WGRAD),
}
"""The two legs of which an array is an operand."""


@dataclasses.dataclass(frozen=True)
class AbstractRecipe(abc.ABC):
    """The interface of every recipe.

    Attributes:
        backward_override: The operands of the backward pass. None: quantized.
            "high_precision": unquantized x, w and g. "dequantized": x and w as the
            forward pass quantized them, and unquantized g. With either of the last two
            a gradient has no quantizer.
        fp8_dpa: Whether activation matmuls, which are those of attention, are
            quantized, too: in FP8 with current scaling, under every recipe.
        has_state: Whether the recipe has scales that are kept between training steps.
            Such a recipe is, or has the members of, `mpx.DelayedScaling`
            (`RecipeWithState`).
    """

    has_state: ClassVar[bool] = False
    backward_override: str | None = dataclasses.field(default=None, kw_only=True)
    fp8_dpa: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        check_flags(self, "fp8_dpa")
        if self.backward_override not in _OVERRIDES:
            raise ValueError(
                f"`backward_override` of `mpx.{type(self).__name__}` must be None, "
                f"'high_precision' or 'dequantized'; got {self.backward_override!r}."
            )

    def quantizer(self, role: Role, *, leg: Leg | None = None) -> Quantizer | None:
        """Returns the quantizer of a role, for `mpx.quantization.quantize`.

        Args:
            role: Input, weight or gradient.
            leg: The matmul of which it is an operand; by default the first of its two:
                forward, for a gradient dgrad.

        Returns:
            A quantizer, or None if the array stays in high precision.

        Raises:
            TypeError: `role` is not a role, or `leg` not a leg.
            ValueError: An array of this role is not an operand of this leg.
        """
        call = f"`{type(self).__name__}.quantizer(role, leg=...)`"
        if not isinstance(role, Role) or not isinstance(leg, Leg | None):
            raise TypeError(
                f"{call} needs a role such as `mpx.quantization.Role.INPUT`, and a leg "
                f"such as `mpx.quantization.Leg.WGRAD`; got {role!r} and {leg!r}."
            )
        leg = leg or LEGS[role][0]
        if leg not in LEGS[role]:
            raise ValueError(
                f"{role!r} is an operand of {' and '.join(map(repr, LEGS[role]))}; got "
                f"{leg!r} in {call}. Omit `leg`, or pass one of these."
            )
        if leg is not Leg.FORWARD and self.backward_override is not None:
            return None
        return self._quantizer(role, leg)

    def _quantizers(self, *roles: Role) -> list[Quantizer]:
        """Returns the quantizers of these roles, by default of all, in all legs."""
        uses = ((role, leg) for role in roles or Role for leg in LEGS[role])
        quantizers = (self.quantizer(role, leg=leg) for role, leg in uses)
        return [one for one in quantizers if one is not None]

    def _has_history(self, *roles: Role) -> bool:
        return any(x.scale_from == "history" for x in self._quantizers(*roles))

    def _for_attention(self) -> "Float8CurrentScaling":
        """Returns the recipe of activation matmuls."""
        format = getattr(self, "fp8_format", Format.HYBRID)
        return Float8CurrentScaling(format, backward_override=self.backward_override)

    def _without_state(self) -> "AbstractRecipe":
        """Returns the recipe of products without scales in the training state."""
        return self

    @abc.abstractmethod
    def _quantizer(self, role: Role, leg: Leg) -> Quantizer | None:
        """Returns the quantizer, after the checks."""


@dataclasses.dataclass(frozen=True)
class Float8CurrentScaling(AbstractRecipe):
    r"""FP8 with one scale per array, from the array itself.

    $$s = \frac{\mathrm{MAX}}{\max(\max|x|, \epsilon)} \qquad
    q = \mathrm{sat}(\mathrm{round}(x \cdot s)) \qquad
    x \approx q \cdot (1 / s)$$

    See `mpx.quantization.TensorQuantizer` for zeros, infinities and NaN.

    Args:
        fp8_format: `Format.HYBRID` (E4M3, for gradients E5M2) or `Format.E4M3`.
        use_power_2_scales: Rounds scales down to powers of two.
        amax_epsilon: $\epsilon$, the smallest amax.
        one_scale_per_matrix: Whether each matrix of a stack has a scale, as those of
            experts in an einsum, under `jax.vmap` or in `jax.lax.ragged_dot`, whose
            rows then have one for each group. By default the stack shares one.
        backward_override: See `mpx.quantization.AbstractRecipe`.
        fp8_dpa: See `mpx.quantization.AbstractRecipe`.

    Raises:
        TypeError: An option is of the wrong kind.
        ValueError: An option has a value that is not listed.

    Source: NVIDIA, Transformer Engine's documentation, FP8 current scaling, and its
    grouped linear layers.

    Examples:
        >>> import mpx
        >>> mpx.Float8CurrentScaling().quantizer(mpx.quantization.Role.GRADIENT).format
        <Format.E5M2>
    """

    fp8_format: Format = Format.HYBRID
    use_power_2_scales: bool = False
    amax_epsilon: float = 0.0
    one_scale_per_matrix: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fp8_format(self)
        check_flags(self, "use_power_2_scales", "one_scale_per_matrix")
        check_epsilon(self)

    def _quantizer(self, role: Role, leg: Leg) -> Quantizer:
        return Quantizer(
            format_of(self.fp8_format, role),
            2 if self.one_scale_per_matrix else 0,
            scales="power of two" if self.use_power_2_scales else "float32",
            amax_epsilon=self.amax_epsilon,
        )


@dataclasses.dataclass(frozen=True)
class Float8BlockScaling(AbstractRecipe):
    r"""FP8 in blocks of 1x128 (inputs, gradients) and 128x128 (weights).

    $$s_b = 2^{\left\lfloor \log_2 (\mathrm{MAX} / \max(\max_b|x|, \epsilon))
    \right\rfloor} \qquad
    q = \mathrm{sat}(\mathrm{round}(x \cdot s_b)) \qquad
    x \approx q \cdot (1 / s_b)$$

    Blocks are along the axis that the matmul contracts, so input and gradient are
    quantized again for dw. See `mpx.quantization.BlockQuantizer` for zeros, infinities
    and NaN.

    Args:
        use_f32_scales: Omits the floor to a power of two.
        fp8_format: `Format.E4M3` or `Format.HYBRID`.
        amax_epsilon: $\epsilon$, the smallest amax.
        x_block_scaling_dim: 1 or 2, for 1x128 or 128x128 blocks of inputs.
        w_block_scaling_dim: The same for weights.
        grad_block_scaling_dim: The same for gradients. Every matmul multiplies two of
            the three roles, and at most one of the two may be 2.
        backward_override: See `mpx.quantization.AbstractRecipe`.
        fp8_dpa: See `mpx.quantization.AbstractRecipe`.

    Raises:
        TypeError: An option is of the wrong kind.
        ValueError: An option has a value that is not listed, or more than one role has
            square blocks.

    Source: NVIDIA, Transformer Engine's documentation, FP8 block scaling.

    Examples:
        >>> import mpx
        >>> from mpx.quantization import Role
        >>> mpx.Float8BlockScaling().quantizer(Role.WEIGHT).block_dimensions
        2
    """

    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    amax_epsilon: float = 0.0
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fp8_format(self)
        check_flags(self, "use_f32_scales")
        check_epsilon(self)
        square = 0
        for role in ("x", "w", "grad"):
            dimensions = getattr(self, f"{role}_block_scaling_dim")
            if dimensions not in (1, 2):
                raise ValueError(
                    f"`{role}_block_scaling_dim` of `mpx.Float8BlockScaling` must be "
                    f"1 or 2; got {dimensions!r}."
                )
            square += dimensions == 2
        if square > 1:
            raise ValueError(
                "`mpx.Float8BlockScaling` multiplies square blocks only with 1x128 "
                f"blocks; got {self!r}. Set at most one `..._block_scaling_dim` to 2."
            )

    def _quantizer(self, role: Role, leg: Leg) -> Quantizer:
        return BlockQuantizer(
            format_of(self.fp8_format, role),
            {
                Role.INPUT: self.x_block_scaling_dim,
                Role.WEIGHT: self.w_block_scaling_dim,
                Role.GRADIENT: self.grad_block_scaling_dim,
            }[role],
            power_of_two_scales=not self.use_f32_scales,
            amax_epsilon=self.amax_epsilon,
        )


@dataclasses.dataclass(frozen=True)
class MXFP8BlockScaling(AbstractRecipe):
    r"""MXFP8: blocks of 1x32 numbers, each with a power of two in 8 bits as its scale.

    $$e_b = \left\lceil \log_2 (\max\nolimits_b|x| / \mathrm{MAX}) \right\rceil \qquad
    q = \mathrm{sat}(\mathrm{round}(x \cdot 2^{-e_b})) \qquad
    x \approx q \cdot 2^{e_b}$$

    Blocks are along the axis that the matmul contracts, so all three roles are
    quantized twice. See `mpx.quantization.MXFP8Quantizer` for zeros, infinities and
    NaN.

    Args:
        fp8_format: `Format.E4M3` or `Format.HYBRID`.
        kernel: The implementation that quantizes on a device with hardware for blocks.
            None: the compiler's, in four passes over an array.
            `mpx.contrib.PallasKernel()`: a kernel that reads it once. **No device has
            run it yet.**
        backward_override: See `mpx.quantization.AbstractRecipe`.
        fp8_dpa: See `mpx.quantization.AbstractRecipe`.

    Raises:
        TypeError: `fp8_format` is not a format, or `kernel` is not a kernel.
        ValueError: An option has a value that is not listed.

    Source: OCP Microscaling Formats (MX) Specification 1.0; NVIDIA, Transformer
    Engine's documentation, MXFP8.

    Examples:
        >>> import mpx
        >>> mpx.MXFP8BlockScaling().quantizer(mpx.quantization.Role.INPUT).format
        <Format.E4M3>
    """

    fp8_format: Format = Format.E4M3
    kernel: AbstractKernel | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fp8_format(self)
        _check_kernel(self)

    def _quantizer(self, role: Role, leg: Leg) -> Quantizer:
        return MXFP8Quantizer(format_of(self.fp8_format, role))


@dataclasses.dataclass(frozen=True)
class NVFP4BlockScaling(AbstractRecipe):
    r"""NVFP4: 4 bits, blocks of 1x16 (weights 16x16), each with an E4M3 scale.

    $$t = \frac{448 \cdot 6}{\max|x|} \qquad
    b = \mathrm{E4M3}\!\left(\max\nolimits_b|x| \cdot \frac{t}{6}\right) \qquad
    q = \mathrm{E2M1}\!\left(x \cdot \frac{1}{b \cdot (1 / t)}\right)$$

    and $x \approx q \cdot (b \cdot (1 / t))$. Gradients are rounded stochastically,
    both operands of dw are Hadamard-transformed along the tokens, and weights have
    square blocks, so that w and wᵀ have the same values. Each of the three can be
    disabled. See `mpx.quantization.NVFP4Quantizer` for zeros, infinities and NaN.

    Args:
        disable_rht: Omits the random Hadamard transform.
        disable_stochastic_rounding: Rounds gradients to nearest.
        disable_2d_quantization: Uses 1x16 blocks for weights, too.
        fp4_format: `Format.E2M1`.
        kernel: The implementation that quantizes on a device with hardware for blocks.
            None: the compiler's, in many passes over an array.
            `mpx.contrib.PallasKernel()`: two kernels that read it once each. **No
            device has run them yet.**
        backward_override: See `mpx.quantization.AbstractRecipe`.
        fp8_dpa: See `mpx.quantization.AbstractRecipe`.

    Raises:
        TypeError: An option is of the wrong kind.
        ValueError: An option has a value that is not listed.

    Source: NVIDIA, Pretraining Large Language Models with NVFP4 (arXiv:2509.25149),
    section 4.

    Examples:
        >>> import mpx
        >>> recipe = mpx.NVFP4BlockScaling()
        >>> from mpx.quantization import Leg, Role
        >>> quantizer = recipe.quantizer(Role.GRADIENT, leg=Leg.WGRAD)
        >>> quantizer.stochastic_rounding, quantizer.hadamard
        (True, True)
    """

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    fp4_format: Format = Format.E2M1
    kernel: AbstractKernel | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flags(
            self,
            "disable_rht",
            "disable_stochastic_rounding",
            "disable_2d_quantization",
        )
        _check_kernel(self)
        if self.fp4_format is not Format.E2M1:
            raise ValueError(
                "`fp4_format` of `mpx.NVFP4BlockScaling` must be `mpx.Format.E2M1`; "
                f"got {self.fp4_format!r}."
            )

    def _quantizer(self, role: Role, leg: Leg) -> Quantizer:
        square = role is Role.WEIGHT and not self.disable_2d_quantization
        stochastic = role is Role.GRADIENT and not self.disable_stochastic_rounding
        return NVFP4Quantizer(
            2 if square else 1,
            hadamard=leg is Leg.WGRAD and not self.disable_rht,
            stochastic_rounding=stochastic,
        )


@dataclasses.dataclass(frozen=True)
class Float8RowwiseScaling(AbstractRecipe):
    r"""FP8 with a scale for each row and each column of a matmul.

    $$s_i = \frac{\mathrm{MAX}}{\max(\max_k|x_{ik}|, \epsilon)} \qquad
    q_{ik} = \mathrm{sat}(\mathrm{round}(x_{ik} \cdot s_i)) \qquad
    y_{ij} = \frac{1}{s_i} \frac{1}{t_j} \sum_k q_{ik} r_{kj}$$

    with the numbers $r$ and scales $t$ of the other operand. Input and weight keep
    these numbers for the backward pass. It sums over the axis of their scales, so
    these multiply the gradient, which is then quantized once for each of its matmuls.
    The scale of a row of zeros is 1. A row that contains an infinity or a NaN has the
    scale NaN and is NaN.

    Args:
        fp8_format: `Format.E4M3` or `Format.HYBRID`.
        use_power_2_scales: Rounds scales down to powers of two.
        amax_epsilon: $\epsilon$, the smallest amax.
        backward_override: See `mpx.quantization.AbstractRecipe`.
        fp8_dpa: See `mpx.quantization.AbstractRecipe`.

    Raises:
        TypeError: An option is of the wrong kind.
        ValueError: An option has a value that is not listed.

    Source: PyTorch, torchao's documentation of float8 training, recipe "rowwise", which
    quantizes input and weight again for the backward pass.

    Examples:
        >>> import mpx
        >>> recipe = mpx.Float8RowwiseScaling()
        >>> quantizer = recipe.quantizer(mpx.quantization.Role.INPUT)
        >>> quantizer.block_dimensions, quantizer.block
        (1, 0)
    """

    fp8_format: Format = Format.E4M3
    use_power_2_scales: bool = True
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fp8_format(self)
        check_flags(self, "use_power_2_scales")
        check_epsilon(self)

    def _quantizer(self, role: Role, leg: Leg) -> Quantizer:
        return Quantizer(
            format_of(self.fp8_format, role),
            1,
            scales="power of two" if self.use_power_2_scales else "float32",
            amax_epsilon=self.amax_epsilon,
        )


@dataclasses.dataclass(frozen=True)
class Int8CurrentScaling(AbstractRecipe):
    r"""Integers of 8 bits, with a scale for each row and each column of a matmul.

    $$s_i = \frac{127}{\max_k|x_{ik}|} \qquad
    q_{ik} = \mathrm{round}(x_{ik} \cdot s_i) \qquad
    y_{ij} = \frac{1}{s_i} \frac{1}{t_j} \sum_k q_{ik} r_{kj}$$

    with the numbers $r$ and scales $t$ of the other operand, and sums of integers. The
    backward pass is that of `mpx.Float8RowwiseScaling`. The scale of a row of zeros is
    1. Integers have no NaN: a row that contains an infinity or a NaN has the scale NaN,
    and all that is computed from it is NaN.

    Args:
        one_scale: Whether an array has one scale, which is computed faster and loses
            more if rows differ in size.
        backward_override: See `mpx.quantization.AbstractRecipe`.
        fp8_dpa: See `mpx.quantization.AbstractRecipe`.

    Raises:
        TypeError: An option is of the wrong kind.
        ValueError: An option has a value that is not listed.

    Source: Google, AQT (Accurate Quantized Training), `config_v3`; Jacob et al.,
    arXiv:1712.05877, section 2.

    Examples:
        >>> import mpx
        >>> mpx.Int8CurrentScaling().quantizer(mpx.quantization.Role.WEIGHT).format
        <Format.INT8>
    """

    one_scale: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flags(self, "one_scale")

    def _quantizer(self, role: Role, leg: Leg) -> Quantizer:
        return Quantizer(Format.INT8, 0 if self.one_scale else 1)


@dataclasses.dataclass(frozen=True)
class CustomRecipe(AbstractRecipe):
    r"""A custom recipe: a function from role and leg to quantizer.

    $$s,\;q,\;x \approx \ldots \quad\text{are those of}\quad
    \mathrm{qfactory}(\mathrm{role}, \mathrm{leg})$$

    Args:
        qfactory: Called as `qfactory(role, leg=leg)`; returns a quantizer, or None to
            leave the array in high precision. Recipes are compared and hashed by it:
            define it once, not again for every step.
        backward_override: See `mpx.quantization.AbstractRecipe`.
        fp8_dpa: See `mpx.quantization.AbstractRecipe`.

    Raises:
        TypeError: `qfactory` is not callable; or, when called, it returns neither a
            quantizer nor None.
        ValueError: `backward_override` has a value that is not listed.

    Examples:
        >>> import mpx
        >>> def qfactory(role, leg):
        ...     if role is mpx.quantization.Role.GRADIENT:
        ...         return mpx.quantization.MXFP8Quantizer(mpx.Format.E5M2)
        ...     return mpx.quantization.NVFP4Quantizer()
        >>> mpx.CustomRecipe(qfactory).quantizer(mpx.quantization.Role.INPUT).format
        <Format.E2M1>
    """

    qfactory: Callable[..., Quantizer | None]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.qfactory):
            raise TypeError(
                "`qfactory` of `mpx.CustomRecipe` must be a function from role to "
                f"quantizer; got {self.qfactory!r}."
            )
        try:
            inspect.signature(self.qfactory).bind(Role.INPUT, leg=Leg.FORWARD)
        except TypeError as error:
            raise TypeError(
                "`qfactory` of `mpx.CustomRecipe` must take `(role, leg)`, a "
                "`mpx.quantization.Role` and a `mpx.quantization.Leg`; got "
                f"{self.qfactory!r}: {error}."
            ) from None

    def _quantizer(self, role: Role, leg: Leg) -> Quantizer | None:
        found = self.qfactory(role, leg=leg)
        if not isinstance(found, Quantizer | None):
            raise TypeError(
                "`qfactory` of `mpx.CustomRecipe` must return a quantizer such as "
                f"`mpx.quantization.TensorQuantizer()`, or None; got {found!r} for "
                f"{role!r}, {leg!r}."
            )
        if found is not None and found.scale_from == "history":
            raise ValueError(
                "A quantizer of `mpx.CustomRecipe` has no history; got "
                f"{found!r}. Use `mpx.quantization.RecipeByLeg` with "
                "`mpx.DelayedScaling`."
            )
        return found


def format_of(format: Format, role: Role) -> Format:
    """Returns the format of a role: a pair's second one for gradients."""
    return format.backward if role is Role.GRADIENT else format.forward


def check_fp8_format(recipe: AbstractRecipe) -> None:
    """Raises unless the field `fp8_format` is E4M3 or HYBRID."""
    format = getattr(recipe, "fp8_format", None)
    name = f"`fp8_format` of `mpx.{type(recipe).__name__}`"
    if not isinstance(format, Format):
        raise TypeError(f"{name} must be a `mpx.Format`; got {format!r}.")
    if format not in (Format.E4M3, Format.HYBRID):
        why = {
            Format.E5M2: ": 2 bits of mantissa are too few for weights.",
            Format.E2M1: ". For 4 bits use `mpx.NVFP4BlockScaling`.",
            Format.INT8: ". For integers use `mpx.Int8CurrentScaling`.",
        }[format]
        raise ValueError(
            f"{name} must be `mpx.Format.E4M3` or `mpx.Format.HYBRID`; got {format!r}"
            + why
        )


def _check_kernel(recipe: MXFP8BlockScaling | NVFP4BlockScaling) -> None:
    if not isinstance(recipe.kernel, AbstractKernel | None):
        raise TypeError(
            f"`kernel` of `mpx.{type(recipe).__name__}` must be None or a kernel; "
            f"got {recipe.kernel!r}. Pass `mpx.contrib.PallasKernel()`, or omit it."
        )
