"""Settings: dtypes, options and rules, and how they reach a call or an equation.

In order of reading:

* `_cast`: casts the float leaves of a tree, and the inputs and results of a function;
* `_policy`: `Policy`, the dtypes of parameters, computation, outputs and communication;
* `_rules`: `Rule` and `Rules`, the user's choice for single operations;
* `_settings`: `Settings`, the options of autocast, and the mark of its functions;
* `_ambient`: the state around a call, in two records.
"""

from ._ambient import (
    Cast,
    Payloads,
    ambient,
    casting_inputs,
    note_float16,
    noting_float16,
    resolved,
    settings_of,
    trace,
    unkeyed,
    with_ambient,
    with_settings,
    with_unkeyed,
)
from ._cast import (
    call_in,
    cast_function,
    cast_leaf,
    cast_leaves,
    cast_to_bfloat16,
    cast_to_float16,
    cast_to_float32,
    cast_to_full_precision,
    cast_to_half_precision,
    cast_tree,
    refuse_uncallable,
)
from ._policy import Policy, Wire, get_policy
from ._rules import (
    Candidate,
    Precision,
    Rule,
    Rules,
    as_written,
    is_recipe_class,
    is_within,
    matches,
    read_switch,
)
from ._settings import (
    MARK,
    Mark,
    Settings,
    Weights,
    parameters_of,
    read_weights,
    recipes_in,
    region,
    unwrapped,
    weights_in_call,
    weights_of,
)
