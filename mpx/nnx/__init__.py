"""Flax NNX: gradients and updates of modules that are changed in place.

An NNX module keeps its parameters, batch statistics and random streams in itself, and a
forward pass changes them in place. `value_and_grad` and `update` stand in for
`nnx.value_and_grad` and `optimizer.update` in a training step:

    @nnx.jit
    def step(model, optimizer, scaling, batch):
        result = mpx.nnx.value_and_grad(loss_fn, scaling)(model, batch)
        mpx.nnx.update(optimizer, model, result.grads, result.finite)
        return result.scaling, result.value

**Good steps** leave everything as the two of NNX do: parameters, batch statistics,
random streams, caches, sown values, attributes, `optimizer.step`.

**Skipped steps**, those whose loss or gradients are not finite, leave all arrays as
they were, bit for bit, as if the batch had never come: parameters and the optimizer
with its step, and what the forward pass changed too. Statistics of a batch that
overflowed must not be kept; a random stream that stays draws the same masks for the
next batch, which is another one. What JAX cannot choose by a traced value stays
changed: attributes that are no arrays, and places that held none before, such as sown
values. With `mpx.NoLossScaling(skip=False)` no step is skipped.

**With autocast**, `value_and_grad(mpx.autocast(loss_fn), scaling)`, no input is cast;
`mpx.autocast` alone, around any function of NNX objects or a module, keeps what changes
in them, too.

**What is cast** to half precision in the explicit style, inside of the differentiated
function: the differentiated Variables, all other `nnx.Param`, arrays that are plain
attributes, and float leaves of the other arguments. Every other Variable (`BatchStat`,
`Cache`, your own) keeps its dtype, and what the forward pass writes into a Variable
takes the dtype that the Variable had.

This module needs Flax and imports it; `import mpx` does neither.
"""

from ._gradients import (
    blame as blame,
    grad as grad,
    value_and_grad as value_and_grad,
)
from ._update import update as update

__all__ = ["grad", "value_and_grad", "blame", "update"]
