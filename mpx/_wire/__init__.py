"""What travels between devices: weights on the way in, gradients on the way back."""

from ._gathering import Gathering
from ._sums import dtype_of_sums, refuse_sums_of_others, wide_product
from ._weights import (
    cast_where_it_lies,
    gathered,
    joined,
    only_gradient,
    travelling_dtype,
)
