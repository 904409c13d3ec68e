"""A table with one record for each primitive, shared by several parts of mpx.

The records do not depend on operands: decisions that do are made elsewhere. A module
that treats one primitive specially names it itself. A primitive that is not in the
table runs as written, in float32 where the program is in float32, so operations between
matmuls need no entry. Equinox's primitives are included because mpx depends on Equinox.

The keys are names, not primitive objects: most primitives are not public objects, and a
jaxpr prints their names.
"""

import dataclasses
import enum
from typing import Any


class PrimitiveClass(enum.Enum):
    """How autocast handles a primitive by default."""

    HALF = "half"
    """Computed in half precision: matmuls and convolutions."""
    FULL = "full"
    """Computed in float32: everything between matmuls."""
    MOVE = "move"
    """Moves or communicates data in its present dtype."""
    CONVERT = "convert"
    """A cast by the user, which is respected."""
    RECURSE = "recurse"
    """Holds a program, which is cast, too."""
    OPAQUE = "opaque"
    """Runs as written, in declared dtypes, like primitives outside the table."""


class Flops(enum.Enum):
    """How the floating-point operations of a primitive are counted."""

    UNKNOWN = enum.auto()
    ZERO = enum.auto()
    """It moves, casts or creates data, or computes with integers."""
    ELEMENTWISE = enum.auto()
    REDUCTION = enum.auto()
    PER_OPERAND_ELEMENT = enum.auto()
    SCATTER = enum.auto()
    SORT = enum.auto()
    WINDOW = enum.auto()
    SELECT_AND_SCATTER = enum.auto()
    DOT_GENERAL = enum.auto()
    RAGGED_DOT = enum.auto()
    LAST_AXIS_PRODUCT = enum.auto()
    CONVOLUTION = enum.auto()
    ATTENTION_FORWARD = enum.auto()
    ATTENTION_BACKWARD = enum.auto()
    FFT = enum.auto()
    CHOLESKY = enum.auto()
    LU = enum.auto()
    QR = enum.auto()
    REFLECTORS = enum.auto()
    TRIANGULAR_SOLVE = enum.auto()
    PALLAS = enum.auto()


class Saves(enum.Enum):
    """The values that JAX's derivative of a primitive saves for the backward pass."""

    NOTHING = enum.auto()
    OPERAND = enum.auto()
    RESULT = enum.auto()
    RESULT_AND_SLOPE = enum.auto()
    """The result, and another array as large, from which the slope is computed."""
    OTHERS = enum.auto()
    """For the derivative by one operand, the others."""
    CHOICE = enum.auto()
    """A boolean for each element of the result: which operand it is."""
    PREDICATE = enum.auto()
    """Its first operand."""
    SAME = enum.auto()
    """Nothing; and the result has the operand's data, which needs no bytes."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Properties:
    """The record of a primitive.

    Attributes:
        kind: What autocast does with it.
        is_quantizable: It is a matmul or convolution that recipes can quantize.
        is_sparse: It multiplies a sparse matrix. JAX sums in the dtype of its operands,
            where other matmuls sum in the tensor cores' float32.
        flops: How its operations are counted.
        saves: The values that its derivative saves.
        moves: Each result consists of elements of the first operand only, or of the
            operand at the same position.
        repeats: It moves, and its result may be larger than the operand.
        rearranges: It moves, and its result has every element of the operand once.
        gathers: It moves data between sharded and replicated layouts.
        spreads: It marks a replicated value as one that may differ between devices.
        sums: It sums along named axes: of devices, or of `jax.vmap`.
        joins: Its result has elements of several operands.
        picks: Each result element is an operand's element, its negative, or zero, and
            contributes once to its gradient: rounding before or after gives equal
            values.
        orders: It compares the order of two values.
        adds: It adds or subtracts two operands.
        factors: It factors or inverts its first operand, a matrix, whose condition
            number multiplies errors.
        is_barrier: No island continues past it, though its class is cheap: it is
            expensive, or must not be repeated (names, shardings, collectives).
        program: The parameter with the one program whose inputs are its operands.
        runs_once: Its program runs once, in place.
        joins_regions: Its program may be part of an island.
        combines: Its program is a scalar combiner, or a kernel whose instructions work
            on references: the equation is one operation.
        hides_a_program: It holds a program that is not a jaxpr.
        is_free: It neither reads nor writes: the same data with another shape, name or
            mark.
        reads_part: It reads only the part of its operand that it returns.
        writes_part: It writes only the part of its operand that it changes.
        is_access: It reads and writes the references of a Pallas kernel.
    """

    kind: PrimitiveClass
    is_quantizable: bool = False
    is_sparse: bool = False
    flops: Flops = Flops.UNKNOWN
    saves: Saves = Saves.NOTHING
    moves: bool = False
    repeats: bool = False
    rearranges: bool = False
    gathers: bool = False
    spreads: bool = False
    sums: bool = False
    joins: bool = False
    picks: bool = False
    orders: bool = False
    adds: bool = False
    factors: bool = False
    is_barrier: bool = False
    program: str = ""
    runs_once: bool = False
    joins_regions: bool = False
    combines: bool = False
    hides_a_program: bool = False
    is_free: bool = False
    reads_part: bool = False
    writes_part: bool = False
    is_access: bool = False

    @property
    def is_cheap(self) -> bool:
        """Whether it costs little more than reading its operands."""
        return self.kind in _CHEAP and not self.is_barrier


_CHEAP = frozenset((PrimitiveClass.FULL, PrimitiveClass.MOVE, PrimitiveClass.CONVERT))

PRIMITIVES: dict[str, Properties] = {}
UNKNOWN = Properties(kind=PrimitiveClass.OPAQUE)


def properties(name: str) -> Properties:
    """Returns the record of the primitive with this name."""
    return PRIMITIVES.get(name, UNKNOWN)


def _group(
    names: str,
    kind: PrimitiveClass,
    flops: Flops = Flops.UNKNOWN,
    traits: str = "",
    saves: Saves = Saves.NOTHING,
    program: str = "",
) -> None:
    """Adds primitives with one record; `traits` names its true attributes."""
    true: dict[str, Any] = dict.fromkeys(traits.split(), True)
    record = Properties(kind=kind, flops=flops, saves=saves, program=program, **true)
    for name in names.split():
        if name in PRIMITIVES:
            raise ValueError(f"the primitive {name} is in two groups")
        PRIMITIVES[name] = record


# --- Matmuls, in half precision -------------------------------------------------------

_HALF = PrimitiveClass.HALF
_group("dot_general", _HALF, Flops.DOT_GENERAL, "is_quantizable", saves=Saves.OTHERS)
_group("ragged_dot_general", _HALF, Flops.RAGGED_DOT, "is_quantizable")
_group("conv_general_dilated", _HALF, Flops.CONVOLUTION, "is_quantizable")
_group("ragged_dot", _HALF, Flops.LAST_AXIS_PRODUCT)
_group("dot_product_attention_fwd_wrapper", _HALF, Flops.ATTENTION_FORWARD)
_group("dot_product_attention", _HALF)
# Sampled dense matmuls, and those with a sparse result, run as written: not here.
_group(
    "bcoo_dot_general bcsr_dot_general coo_matmat coo_matvec csr_matmat csr_matvec",
    _HALF,
    traits="is_sparse",
)

# --- Between matmuls, in float32 ------------------------------------------------------

_FULL = PrimitiveClass.FULL
_group(
    """
    acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cos cosh digamma erf erf_inv
    erfc integer_pow lgamma log log1p log2 one_minus_square polynomial sign sin sinh
    square
    """,
    _FULL,
    Flops.ELEMENTWISE,
    saves=Saves.OPERAND,
)
_group(
    "cbrt exp exp2 expm1 rsqrt sqrt tan", _FULL, Flops.ELEMENTWISE, saves=Saves.RESULT
)
_group("logistic tanh", _FULL, Flops.ELEMENTWISE, saves=Saves.RESULT_AND_SLOPE)
_group("atan2 igamma igammac pow rem", _FULL, Flops.ELEMENTWISE, saves=Saves.OTHERS)
_group(
    """
    _copysign ceil eq eq_to floor igamma_grad_a is_finite mulhi ne polygamma
    random_gamma random_gamma_grad regularized_incomplete_beta round zeta
    """,
    _FULL,
    Flops.ELEMENTWISE,
)
_group("ge gt le le_to lt lt_to", _FULL, Flops.ELEMENTWISE, "orders")
_group("add add_any sub", _FULL, Flops.ELEMENTWISE, "adds")
_group("div", _FULL, Flops.ELEMENTWISE, saves=Saves.OTHERS)
_group("mul", _FULL, Flops.ELEMENTWISE, saves=Saves.OTHERS)
_group("abs", _FULL, Flops.ELEMENTWISE, "picks", saves=Saves.OPERAND)
_group("neg", _FULL, Flops.ELEMENTWISE, "picks")
_group("clamp max min", _FULL, Flops.ELEMENTWISE, saves=Saves.CHOICE)
_group("select_n", _FULL, Flops.ELEMENTWISE, "joins picks", saves=Saves.PREDICATE)
_group("concatenate pad stack", _FULL, Flops.ZERO, "joins picks")
_group("tie", _FULL, Flops.ZERO)
_group("reduce_sum", _FULL, Flops.REDUCTION)
_group("reduce_max reduce_min reduce_prod", _FULL, Flops.REDUCTION, saves=Saves.OPERAND)
_group("argmax argmin", _FULL, Flops.REDUCTION)
_group(
    "approx_top_k cumlogsumexp cummax cummin cumprod cumsum top_k",
    _FULL,
    Flops.PER_OPERAND_ELEMENT,
    "is_barrier",
)
_group("sort", _FULL, Flops.SORT, "is_barrier")
_group(
    "reduce_window_max reduce_window_min reduce_window_sum",
    _FULL,
    Flops.WINDOW,
    "is_barrier",
)
_group("dynamic_update_slice", _FULL, Flops.ZERO, "picks is_barrier writes_part")
_group("scatter", _FULL, Flops.ZERO, "is_barrier combines writes_part")
_group(
    "scatter-add scatter-max scatter-min scatter-mul scatter-sub",
    _FULL,
    Flops.SCATTER,
    "is_barrier combines writes_part",
)
_group("select_and_gather_add", _FULL, Flops.WINDOW, "is_barrier combines")
_group("select_and_scatter_add", _FULL, Flops.SELECT_AND_SCATTER, "is_barrier combines")
# Integers, booleans, and operations without floating-point operands.
_group(
    """
    and clz not or population_count reduce_and reduce_or reduce_xor shift_left
    shift_right_arithmetic shift_right_logical xor
    axis_index dim_as_value dimension_size iota iota_2x32_shape zeros_like
    add_dependency assert_consumed_value shard_alike
    unvmap_all unvmap_any unvmap_max
    """,
    _FULL,
    Flops.ZERO,
)

# --- Movement of data -----------------------------------------------------------------

_MOVE = PrimitiveClass.MOVE
_group("copy rev transpose", _MOVE, Flops.ZERO, "moves rearranges")
_group("copy_p roll split unstack", _MOVE, Flops.ZERO, "moves")
_group(
    "expand_dims reshape squeeze",
    _MOVE,
    Flops.ZERO,
    "moves rearranges is_free",
    saves=Saves.SAME,
)
_group(
    "broadcast_in_dim broadcast_to",
    _MOVE,
    Flops.ZERO,
    "moves repeats",
    saves=Saves.SAME,
)
_group("tile", _MOVE, Flops.ZERO, "moves repeats")
_group("dynamic_slice slice", _MOVE, Flops.ZERO, "moves reads_part")
# An embedding is not part of the island after it.
_group("gather", _MOVE, Flops.ZERO, "moves repeats is_barrier reads_part")
_group("stop_gradient", _MOVE, Flops.ZERO, "moves is_free")
_group("pvary", _MOVE, Flops.ZERO, "moves spreads is_free")
_group(
    "nonbatchable nondifferentiable_backward nontraceable", _MOVE, Flops.ZERO, "is_free"
)
_group("name optimization_barrier", _MOVE, Flops.ZERO, "moves is_barrier is_free")
_group("sharding_constraint", _MOVE, Flops.ZERO, "moves gathers is_barrier is_free")
_group(
    "all_gather all_gather_invariant reshard",
    _MOVE,
    Flops.ZERO,
    "moves gathers is_barrier",
)
_group(
    """
    all_gather_reduced all_to_all device_put layout_constraint pbroadcast
    pbroadcast_dynamic ppermute relayout with_memory_space_constraint
    """,
    _MOVE,
    Flops.ZERO,
    "moves is_barrier",
)
# Sums over devices are communicated in the dtype of their terms.
_group(
    "psum psum2 psum_invariant reduce_scatter unreduced_psum unreduced_reduce_scatter",
    _MOVE,
    Flops.PER_OPERAND_ELEMENT,
    "sums is_barrier",
)
_group(
    "pmax pmin unreduced_pmax unreduced_pmin",
    _MOVE,
    Flops.PER_OPERAND_ELEMENT,
    "is_barrier",
)
_group(
    """
    preduced ragged_all_to_all reduced_vary_cast reduced_vary_cast_p
    vary_unreduced_cast vary_unreduced_cast_p
    """,
    _MOVE,
    Flops.ZERO,
    "is_barrier",
)
_group("convert_element_type", PrimitiveClass.CONVERT, Flops.ZERO)

# --- Programs within programs ---------------------------------------------------------

_RECURSE = PrimitiveClass.RECURSE
_group("jit pjit", _RECURSE, traits="runs_once joins_regions", program="jaxpr")
_group(
    "closed_call custom_jvp_call",
    _RECURSE,
    traits="runs_once joins_regions",
    program="call_jaxpr",
)
_group(
    "call core_call custom_vjp_call eval_jaxpr",
    _RECURSE,
    traits="runs_once",
    program="call_jaxpr",
)
_group(
    "checkpoint remat remat2 shard_map", _RECURSE, traits="runs_once", program="jaxpr"
)
_group("composite", _RECURSE, traits="runs_once", program="jaxpr")
_group("custom_vmap_call", _RECURSE, traits="runs_once", program="call")
_group("remat_opt", _RECURSE, traits="runs_once", program="fwd_jaxpr")
_group("cond scan while", _RECURSE)

# --- Operations that run as written ---------------------------------------------------

_OPAQUE = PrimitiveClass.OPAQUE
_group(
    "compute_on custom_partitioning fused_call jaxpr_call xla_metadata_call xla_pmap",
    _OPAQUE,
    traits="runs_once",
)
# Equinox's, and an exported program: strings or closures.
_group("call_exported noinline", _OPAQUE, traits="hides_a_program")
_group("pallas_call", _OPAQUE, Flops.PALLAS, "combines")
_group("reduce", _OPAQUE, Flops.REDUCTION, "combines")
_group("reduce_window", _OPAQUE, Flops.WINDOW, "combines")
_group("select_and_scatter", _OPAQUE, Flops.SELECT_AND_SCATTER, "combines")
# The user chose their dtypes and scales: half precision by name, but not cast.
_group("scaled_matmul scaled_matmul_wrapper", _OPAQUE, Flops.LAST_AXIS_PRODUCT)
_group("dot_product_attention_bwd_wrapper", _OPAQUE, Flops.ATTENTION_BACKWARD)
_group("core_map cudnn_fusion custom_linear_solve linear_call run_state", _OPAQUE)
# mpx's own: a form of a quantized product for its target, see `_quantize`.
_group("on_target", _OPAQUE, traits="runs_once")
_group("cholesky", _OPAQUE, Flops.CHOLESKY, "factors")
_group("lu", _OPAQUE, Flops.LU, "factors")
_group("qr", _OPAQUE, Flops.QR, "factors")
_group("geqrf", _OPAQUE, Flops.REFLECTORS, "factors")
_group("householder_product", _OPAQUE, Flops.REFLECTORS)
_group("triangular_solve", _OPAQUE, Flops.TRIANGULAR_SOLVE, "factors")
_group("eig eigh geqp3 schur svd", _OPAQUE, traits="factors")
_group("fft", _OPAQUE, Flops.FFT)
_group("conj nextafter reduce_precision stochastic_round", _OPAQUE, Flops.ELEMENTWISE)
_group("empty empty2", _OPAQUE, Flops.ZERO, "is_free")
_group(
    """
    bitcast_convert_type complex imag real lu_pivots_to_permutation platform_index
    philox2x32 philox4x32 prng_join prng_random_bits prng_seed prng_split random_bits
    random_clone random_fold_in random_seed random_split random_unwrap random_wrap
    rng_bit_generator rng_uniform threefry2x32 threefry4x32
    after_all create_token debug_callback debug_print inspect_sharding print_layout
    """,
    _OPAQUE,
    Flops.ZERO,
)
_group("get swap", _OPAQUE, traits="is_access")

_group("multiple_of num_programs program_id", _OPAQUE, traits="is_access")
