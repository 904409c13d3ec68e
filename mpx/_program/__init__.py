"""What JAX's programs are: primitives, equations, and how facts travel through them.

It knows no precision but the class that each primitive has by default.
"""

from .calls import (
    Call as Call,
    Form as Form,
    divide as divide,
    is_array as is_array,
    is_array_or_type as is_array_or_type,
    named_like as named_like,
)
from .cuts import (
    Box as Box,
    are_apart as are_apart,
    boxes_read as boxes_read,
    is_covered as is_covered,
    is_read_once as is_read_once,
)
from .equations import (
    FEW_USES as FEW_USES,
    OTHERS as OTHERS,
    SubJaxpr as SubJaxpr,
    aval_of as aval_of,
    avals as avals,
    constants_as_inputs as constants_as_inputs,
    count as count,
    distinct_equations as distinct_equations,
    equations as equations,
    is_multiplication as is_multiplication,
    lengths as lengths,
    only_picks as only_picks,
    program_of as program_of,
    sub_jaxprs as sub_jaxprs,
    summed_numbers as summed_numbers,
    where_leading as where_leading,
    zero_results as zero_results,
)
from .flow import (
    BackwardFlow as BackwardFlow,
    Flow as Flow,
    Location as Location,
    NoFlow as NoFlow,
    Visit as Visit,
    backward as backward,
    results_within as results_within,
    walk as walk,
    walk_inside as walk_inside,
)
from .islands import Island as Island, parts as parts
from .primitives import (
    PRIMITIVES as PRIMITIVES,
    Flops as Flops,
    PrimitiveClass as PrimitiveClass,
    properties as properties,
)
from .probe import is_seen_into as is_seen_into, probed as probed
from .probes import Probe as Probe, Records as Records, Tagged as Tagged
from .remat import (
    computed_again as computed_again,
    is_worth_while as is_worth_while,
    recomputed_if_cheap as recomputed_if_cheap,
)
from .residuals import (
    kept_bytes as kept_bytes,
    may_keep as may_keep,
    measured_bytes as measured_bytes,
)
from .source import (
    DataScope as DataScope,
    Frame as Frame,
    ScopeEntry as ScopeEntry,
    Span as Span,
    data_of as data_of,
    data_scope as data_scope,
    scopes as scopes,
    source_frames as source_frames,
    source_span as source_span,
    with_lines_of as with_lines_of,
)
from .streams import (
    goes_around as goes_around,
    is_made_of_product as is_made_of_product,
    is_residual as is_residual,
    is_sum_of_products as is_sum_of_products,
    looked_up as looked_up,
    makers_of as makers_of,
)
