"""The class of every primitive: what autocast does with an operation by default.

A *class* says in which precision an operation is computed, whatever its operands come
in. It belongs to the primitive, never to one equation: what was chosen for an equation,
given its operands, is a decision. A name that stands in no table here is *unknown*;
autocast treats it as opaque and records that it did. Equinox's primitives are here
because mpx depends on Equinox.

Names and not primitive objects are the keys: most primitives are not public objects,
and their names are what a jaxpr prints.
"""

import enum
from typing import Any

import numpy as np


class PrimitiveClass(enum.Enum):
    """What autocast does with a primitive."""

    HALF = "half"
    """Computed in half precision: matrix products and convolutions."""
    FULL = "full"
    """Computed in float32: sums, exponentials, whatever loses digits or overflows."""
    PROMOTE = "promote"
    """Several operands: float32 if one of them was computed in float32."""
    FOLLOW = "follow"
    """One operand that counts: computed in the precision it comes in."""
    CONVERT = "convert"
    """A cast of the user's own, which is respected."""
    RECURSE = "recurse"
    """Holds a program, which is cast in turn."""
    OPAQUE = "opaque"
    """Declared dtypes in, and its results count as computed in float32."""


_HALF = """
bcoo_dot_general conv_general_dilated dot_general ragged_dot ragged_dot_general
dot_product_attention dot_product_attention_fwd_wrapper
"""

# The user chose dtypes and scales of these himself: half in name, but not ours to cast.
_SCALED = """
dot_product_attention_bwd dot_product_attention_bwd_wrapper
dot_product_attention_fp8_bwd dot_product_attention_fp8_bwd_wrapper
dot_product_attention_fp8_fwd dot_product_attention_fp8_fwd_wrapper
dot_product_attention_fwd scaled_dot scaled_matmul scaled_matmul_wrapper
"""

_FULL = """
acos acosh asin asinh atan atan2 atanh cos cosh sin sinh tan
exp exp2 expm1 log log1p log2 polynomial pow sqrt rsqrt cbrt
cumlogsumexp cumprod cumsum reduce_prod reduce_sum reduce_window_sum
scatter-add scatter-mul scatter-sub
bessel_i0e bessel_i1e digamma erf_inv igamma igamma_grad_a igammac lgamma polygamma
random_gamma random_gamma_grad regularized_incomplete_beta zeta
"""

_PROMOTE = """
_copysign add add_any clamp concatenate div dynamic_update_slice max min mul mulhi pad
rem scatter scatter-max scatter-min select_and_gather_add select_and_scatter_add
select_n stack sub tie
eq eq_to ge gt le le_to lt lt_to ne
integer_pow square
"""

# JAX takes 1 - x^2 (`one_minus_square`) of results of tanh and sin, in derivatives.
_FOLLOW = """
abs ceil erf erfc floor logistic neg round sign tanh is_finite stop_gradient
add_dependency assert_consumed_value broadcast_in_dim broadcast_to copy copy_p
device_put dynamic_slice expand_dims gather iota layout_constraint name
one_minus_square optimization_barrier relayout reshape reshard rev roll shard_alike
sharding_constraint slice split squeeze tile transpose unstack
with_memory_space_constraint zeros_like
approx_top_k argmax argmin cummax cummin reduce_max reduce_min reduce_window_max
reduce_window_min sort top_k
all_gather all_gather_invariant all_gather_reduced all_to_all pbroadcast
pbroadcast_dynamic pmax pmin ppermute preduced psum psum2 psum_invariant pvary
ragged_all_to_all reduce_scatter reduced_vary_cast reduced_vary_cast_p unreduced_pmax
unreduced_pmin unreduced_psum unreduced_reduce_scatter vary_unreduced_cast
vary_unreduced_cast_p
and clz not or population_count reduce_and reduce_or reduce_xor shift_left
shift_right_arithmetic shift_right_logical xor
axis_index dimension_size iota_2x32_shape dim_as_value
nonbatchable nondifferentiable_backward nontraceable unvmap_all unvmap_any unvmap_max
"""

_CONVERT = "convert_element_type"

_RECURSE = """
call checkpoint closed_call composite cond core_call custom_jvp_call custom_vjp_call
custom_vmap_call eval_jaxpr jit pjit remat remat2 remat_opt scan shard_map while
"""

_OPAQUE = """
cholesky cholesky_update custom_linear_solve eig eigh geqp3 geqrf hessenberg
householder_product lu lu_pivots_to_permutation ormqr qr schur svd symmetric_product
triangular_solve tridiagonal tridiagonal_solve
complex conj fft imag real
bitcast_convert_type from_edtype nextafter reduce_precision stochastic_round to_edtype
all_reduce_ffs all_reduce_population_count reduce reduce_window select_and_scatter
buffer_callback debug_callback debug_print inspect_sharding io_callback print_layout
pure_callback
call_exported check compute_on ffi_call jaxpr_call mpmd_map pallas_call tpu_custom_call
call_hi_primitive call_hi_primitive_linearized closed_call_hi create_linear consume
core_map cudnn_fusion custom_fusion custom_jvp_call_jaxpr custom_lin
custom_partitioning dce_sink fused_call fusible linear_call
program_order run_state xla_metadata_call xla_metadata_value xla_pmap
philox2x32 philox4x32 prng_join prng_random_bits prng_seed prng_split random_bits
random_clone random_fold_in random_seed random_split random_unwrap random_wrap
rng_bit_generator rng_uniform threefry2x32 threefry4x32
bcoo_dot_general_sampled bcoo_extract bcoo_fromdense bcoo_sort_indices
bcoo_spdot_general bcoo_sum_duplicates bcoo_todense bcoo_transpose bcsr_dot_general
bcsr_extract bcsr_fromdense bcsr_todense coo_fromdense coo_matmat coo_matvec coo_spmm
coo_spmv coo_todense csr_fromdense csr_matmat csr_matvec csr_spmm csr_spmv csr_todense
spsolve todense
rnn_bwd rnn_fwd
accum_grad_in_ref addupdate box_get box_set empty empty_ref empty2 free_ref freeze get
log_extend log_read new_box new_log new_ref pin swap trace_value unpin
after_all all_gather_done all_gather_reduced_start all_gather_start all_to_all_done
all_to_all_start create_token global_array_to_host_local_array
host_local_array_to_global_array pbroadcast_done pbroadcast_start platform_index
ppermute_done ppermute_start precv psend psum_done psum_invariant_start psum_start
reduce_scatter_done reduce_scatter_start shape_assertion unique unreachable
unreduced_psum_start unreduced_reduce_scatter_start
announce_jaxpr maybe_set noinline select_if_vmap vprim
thunky.all_gather thunky.all_reduce thunky.all_to_all thunky.async_done
thunky.async_start thunky.call_jax thunky.call_thunky_nested thunky.collective_group
thunky.collective_permute thunky.cond thunky.copy thunky.custom_call
thunky.inline_constant thunky.memset thunky.memzero thunky.ptx_kernel
thunky.reduce_scatter thunky.while
"""

# Found only in the bodies of Pallas kernels, which autocast does not enter.
_KERNEL = """
async_copy_scales_to_tmem async_copy_smem_to_tmem async_copy_sparse_metadata_to_tmem
async_load async_prefetch async_store_smem async_store_tmem atomic_cas atomic_rmw
barrier barrier_arrive barrier_arrive_and_wait barrier_test barrier_wait bitcast
commit_group commit_smem commit_tmem conv copy_gmem_to_smem copy_smem_to_gmem
debug_barrier debug_barrier_p delay dma_start dma_wait einshape_lo
elementwise_inline_asm elementwise_inline_asm_p emit_pipeline get_barrier_semaphore
get_global griddepcontrol_launch_dependents griddepcontrol_wait has_memory_space
inline_mgpu inline_mgpu_p layout_cast load masked_cummax masked_cummin masked_cumsum
masked_load masked_sort masked_swap matmul_acc_lhs matmul_lhs_fifo matmul_pop
matmul_pop_fifo matmul_push_rhs max_contiguous mgpu_atomic_store mma mosaic_gpu_p
mosaic_gpu_reduce_max mosaic_gpu_reduce_min mosaic_gpu_reduce_prod mosaic_gpu_reduce_sum
multimem_load_reduce multimem_store multiple_of num_programs pack pack_dtype
pack_elementwise parallel_loop pipeline_body program_id query_cluster_cancel reciprocal
remove_memory_space run_scoped sc_fetch_and_add scan_count semaphore_read
semaphore_signal semaphore_signal_multicast semaphore_signal_parallel semaphore_wait
set_max_registers set_max_registers_p stage store tcgen05_commit_arrive tcgen05_mma
try_cluster_cancel unpack unpack_dtype unpack_elementwise wait_gmem_to_smem
wait_load_tmem wait_smem_to_gmem wgmma wgmma_accumulator_deref wgmma_accumulator_deref_p
wgmma_accumulator_store wgmma_accumulator_store_p wgmma_ref wgmma_wait
"""

CLASSES: dict[str, PrimitiveClass] = {
    name: primitive_class
    for primitive_class, names in (
        (PrimitiveClass.HALF, _HALF),
        (PrimitiveClass.FULL, _FULL),
        (PrimitiveClass.PROMOTE, _PROMOTE),
        (PrimitiveClass.FOLLOW, _FOLLOW),
        (PrimitiveClass.CONVERT, _CONVERT),
        (PrimitiveClass.RECURSE, _RECURSE),
        (PrimitiveClass.OPAQUE, _OPAQUE),
        (PrimitiveClass.OPAQUE, _SCALED),
        (PrimitiveClass.OPAQUE, _KERNEL),
    )
    for name in names.split()
}

# float16 ends at 65504: a cube overflows at 40.3, a square at 255.9.
_FULL_IN_FLOAT16 = frozenset({"integer_pow", "square"})


def class_of(primitive: str, dtype: np.dtype) -> PrimitiveClass | None:
    """The class of a primitive.

    Args:
        primitive: The primitive's name.
        dtype: The half precision dtype that is computed in.

    Returns:
        Its class, or None if mpx does not know the primitive.
    """
    if dtype == np.float16 and primitive in _FULL_IN_FLOAT16:
        return PrimitiveClass.FULL
    return CLASSES.get(primitive)


def is_multiplication(equation: Any) -> bool:
    """Whether an equation is a matrix product that sums nothing.

    `jnp.einsum("bl,blp->blp", decay, x)` and `jnp.outer` are multiplications that JAX
    writes as `dot_general`.
    """
    is_product = equation.primitive.name == "dot_general"
    return is_product and not equation.params["dimension_numbers"][0][0]
