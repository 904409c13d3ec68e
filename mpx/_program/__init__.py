"""JAX's programs: primitives, equations, and facts about their values.

The only fact about precision here is each primitive's default class. In order:

- `primitives`: a table with one record for each primitive;
- `equations`: the equations of a program, and the programs that they hold;
- `source`: the user's lines, scopes and transforms of an equation;
- `flow`: propagates facts forward or backward;
- `calls`: converts a call with any PyTrees to a function of arrays;
- `islands`: parts between matmuls that are cheap to recompute, and residual streams;
- `scores`: matmuls that are scaled and masked on their way to a softmax;
- `remat`: recomputes a program in the backward pass, and counts residuals;
- `cuts`: the parts of an array that a program reads;
- `homogeneity`: whether a program is proportional to some inputs;
- `probe`: runs a program and records facts about its values;
- `widening`: rewrites a half-precision program to float32;
- `kernels`: Pallas kernels whose operands and results are in half precision;
- `layouts`: barriers on gradients, for their layout and their order;
- `cpu_products`: bfloat16 matmuls and convolutions in the form for CPUs.
"""

from .calls import Call, Form, divide, is_array_or_type, named_like
from .cpu_products import in_cpu_form, multiply_wide, with_factor
from .cuts import Box, are_apart, boxes_read, is_covered, is_read_once
from .equations import (
    FEW_USES,
    OTHERS,
    SubJaxpr,
    aval_of,
    avals,
    by_platform,
    checkpoint_params,
    constants_as_inputs,
    count,
    distinct_equations,
    forms_of,
    is_along_vmap,
    is_inexact,
    is_matmul,
    is_multiplication,
    lengths,
    number_of,
    only_picks,
    program_of,
    run_by,
    sub_jaxprs,
    summed_numbers,
    where_leading,
    zero_results,
)
from .flow import (
    BackwardFlow,
    Flow,
    Location,
    Visit,
    backward,
    propagate,
    results_within,
    walk,
    walk_inside,
)
from .homogeneity import is_proportional
from .islands import (
    Island,
    goes_around,
    is_activation,
    is_made_of_product,
    is_residual,
    is_scaled,
    is_sum_of_products,
    is_summed_often,
    looked_up,
    makers_of,
    parts,
    reachable,
    sums_before,
)
from .kernels import accesses_of_wide_only, is_reference, with_half_blocks
from .layouts import flat, with_flat_gradient, with_gradients_at_once
from .primitives import PRIMITIVES, Flops, PrimitiveClass, properties
from .probe import Probe, Records, Tagged, is_seen_into, probed
from .remat import (
    computed_again,
    is_worth_while,
    may_keep,
    measured_bytes,
    recomputed_if_cheap,
)
from .scores import scaled_product, subtracts_maximum
from .source import (
    LIBRARIES,
    DataScope,
    Frame,
    ScopeEntry,
    Span,
    data_of,
    data_scope,
    is_inside,
    is_library,
    is_ours,
    line_of,
    real_path,
    scopes,
    source_frames,
    source_span,
    user_frame,
    with_lines_of,
)
from .widening import widened
