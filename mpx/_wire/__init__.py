"""What travels between devices: weights on the way in, gradients on the way back."""

from ._gathering import Gathering as Gathering
from ._sums import (
    dtype_of_sums as dtype_of_sums,
    refuse_sums_of_others as refuse_sums_of_others,
    wide_product as wide_product,
)
from ._weights import (
    cast_where_it_lies as cast_where_it_lies,
    gathered as gathered,
    joined as joined,
    only_gradient as only_gradient,
    travelling_dtype as travelling_dtype,
)
