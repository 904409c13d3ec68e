"""The book of primitives: each stands in it once, and what reads it finds all."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from mpx._autocast import _control_flow, _custom_rules, _loops, _rewrites as _scatter
from mpx._program import (
    PRIMITIVES,
    Flops,
    PrimitiveClass,
    distinct_equations,
    is_matmul,
    primitives,
    properties,
)
from mpx._tools._inspect import _costs

# Imports every module, which the other tests of this process need not suffer.
_SEARCH = """
import gc, importlib, pkgutil, sys
import equinox.internal, jax
from jax.extend.core import Primitive

for module in pkgutil.walk_packages(jax.__path__, "jax.", onerror=lambda _: None):
    if "test" in module.name or ".tools" in module.name:
        continue  # these start programs, or need what is not installed
    try:
        importlib.import_module(module.name)
    except (ImportError, RuntimeError, AttributeError):
        continue  # bindings for a device or a package that is not here
# Autocast does not enter Pallas kernels.
kernels, others = set(), set()
for name, module in list(sys.modules.items()):
    is_kernel = any(word in name for word in ("pallas", "mosaic", "triton"))
    for found in list(getattr(module, "__dict__", {}).values()):
        if isinstance(found, Primitive):
            (kernels if is_kernel else others).add(found.name)
for found in gc.get_objects():
    if isinstance(found, Primitive) and found.name not in kernels - others:
        print(found.name)
"""

# Neither products nor programs nor movement: they run as they were written.
LOOKED_AT = set(
    """
    accum_grad_in_ref addupdate all_gather_done all_gather_reduced_start
    all_gather_start all_reduce_ffs all_reduce_population_count all_to_all_done
    all_to_all_start announce_jaxpr bcoo_dot_general_sampled bcoo_extract bcoo_fromdense
    bcoo_sort_indices bcoo_spdot_general bcoo_sum_duplicates bcoo_todense bcoo_transpose
    bcsr_extract bcsr_fromdense bcsr_todense box_get box_set buffer_callback
    call_hi_primitive call_hi_primitive_linearized check cholesky_update closed_call_hi
    consume coo_fromdense coo_spmm coo_spmv coo_todense create_linear csr_fromdense
    csr_spmm csr_spmv csr_todense custom_fusion custom_jvp_call_jaxpr custom_lin
    dce_sink dot_product_attention_bwd dot_product_attention_fp8_bwd
    dot_product_attention_fp8_bwd_wrapper dot_product_attention_fp8_fwd
    dot_product_attention_fp8_fwd_wrapper dot_product_attention_fwd empty_ref ffi_call
    free_ref freeze from_edtype fusible global_array_to_host_local_array hessenberg
    host_local_array_to_global_array io_callback log_extend log_read maybe_set mpmd_map
    new_box new_log new_ref ormqr pbroadcast_done pbroadcast_start pin ppermute_done
    ppermute_start precv program_order psend psum_done psum_invariant_start psum_start
    pure_callback reduce_scatter_done reduce_scatter_start rnn_bwd rnn_fwd scaled_dot
    select_if_vmap shape_assertion spsolve stage symmetric_product thunky.all_gather
    thunky.all_reduce thunky.all_to_all thunky.async_done thunky.async_start
    thunky.call_jax thunky.call_thunky_nested thunky.collective_group
    thunky.collective_permute thunky.cond thunky.copy thunky.custom_call
    thunky.inline_constant thunky.memset thunky.memzero thunky.ptx_kernel
    thunky.reduce_scatter thunky.while to_edtype todense tpu_custom_call trace_value
    tridiagonal tridiagonal_solve unique unpin unreachable unreduced_psum_start
    unreduced_reduce_scatter_start vprim xla_metadata_value
    """.split()
)


def test_somebody_has_looked_at_every_primitive():
    """A new product, or what holds a program, would else be left in float32."""
    search = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _SEARCH],
        capture_output=True,
        text=True,
        check=True,
    )
    found = set(search.stdout.split())
    assert len(found) > 200, "the search itself is broken"
    assert {"dot_general", "scan", "fft", "while", "psum", "svd"} <= found
    missing = sorted(found - PRIMITIVES.keys() - LOOKED_AT)
    assert not missing, f"group them in primitives.py, or name them here: {missing}"
    assert not LOOKED_AT & PRIMITIVES.keys()


def test_a_primitive_stands_in_one_group():
    before = dict(PRIMITIVES)
    with pytest.raises(ValueError, match="exp is in two groups"):
        primitives._group("exp", PrimitiveClass.FULL)
    assert before == PRIMITIVES


def names(**known):
    return {
        name
        for name, record in PRIMITIVES.items()
        if all(getattr(record, field) == value for field, value in known.items())
    }


def test_functions_for_primitives_are_for_those_that_the_book_has():
    modules = (_control_flow, _loops, _custom_rules)
    programs = {name for module in modules for name in module.REWRITES}
    assert programs == names(kind=PrimitiveClass.RECURSE)
    scatters = names(combines=True, writes_part=True)
    assert _scatter.SCATTERS.keys() == scatters
    assert _costs._COUNTS.keys() == set(Flops) - {Flops.UNKNOWN}


def test_every_primitive_that_autocast_computes_with_is_counted():
    computed = {PrimitiveClass[name] for name in ("HALF", "FULL", "MOVE", "CONVERT")}
    uncounted = names(flops=Flops.UNKNOWN)
    # Sparse products depend on data; mpx's own attention is never in a program whole.
    missing = {name for name in uncounted if PRIMITIVES[name].kind in computed}
    assert missing == {*names(is_sparse=True), "dot_product_attention"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dot_general", PrimitiveClass.HALF),
        ("exp", PrimitiveClass.FULL),
        ("add", PrimitiveClass.FULL),
        ("tanh", PrimitiveClass.FULL),
        ("reshape", PrimitiveClass.MOVE),
        ("psum", PrimitiveClass.MOVE),
        ("convert_element_type", PrimitiveClass.CONVERT),
        ("scan", PrimitiveClass.RECURSE),
        ("svd", PrimitiveClass.OPAQUE),
        ("made_up_by_a_user", PrimitiveClass.OPAQUE),
    ],
)
def test_class(name, expected):
    assert properties(name).kind is expected


def test_products_of_blocks_with_scales_are_matmuls_and_products_of_numbers_are_not():
    def program(a, s):
        return jnp.exp(jax.nn.scaled_matmul(a, a, s, s)), a[0] @ a[0].T * 2

    a, s = jnp.ones((1, 32, 32), jnp.bfloat16), jnp.ones((1, 32, 1), jnp.bfloat16)
    equations = distinct_equations(jax.make_jaxpr(program)(a, s))
    found = [e.primitive.name for e in equations if is_matmul(e)]
    assert {*found} == {"scaled_matmul_wrapper", "dot_general"}
