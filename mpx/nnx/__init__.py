"""Flax NNX: gradients and updates of modules that are changed in place.

An NNX module keeps its parameters, batch statistics and random streams in itself, and a
forward pass changes them in place. `value_and_grad` and `update` replace
`nnx.value_and_grad` and `optimizer.update` in a training step:

    @nnx.jit
    def step(model, optimizer, scaling, batch):
        result = mpx.nnx.value_and_grad(loss_fn, scaling)(model, batch)
        mpx.nnx.update(optimizer, model, result.grads, result.finite)
        return result.scaling, result.value

**Good steps** change the same things as the two of NNX: parameters, batch statistics,
random streams, caches, sown values, attributes, `optimizer.step`.

**Skipped steps**, those whose loss or gradients are non-finite, leave all arrays
unchanged, bit for bit: parameters, the optimizer with its step, and everything that the
forward pass changed. So statistics of a batch that overflowed are dropped, and an
unchanged random stream draws the same masks for the next batch. Non-array attributes,
and new arrays such as sown values, stay changed: JAX cannot select them by a traced
value. With `mpx.NoLossScaling(skip=False)` no step is skipped.

**With autocast**, `value_and_grad(mpx.autocast(loss_fn), scaling)`, no input is cast;
`mpx.autocast` alone, around any function of NNX objects or a module, also keeps changes
to them.

**Casts to half precision** in the explicit style, inside the differentiated function:
the differentiated Variables, all other `nnx.Param`, arrays that are plain attributes,
and float leaves of the other arguments. Every other Variable (`BatchStat`, `Cache`,
your own) keeps its dtype, and values that the forward pass writes into a Variable are
cast to the Variable's dtype.

This module needs Flax and imports it; `import mpx` does neither.
"""

from ._gradients import (
    blame as blame,
    compare as compare,
    grad as grad,
    value_and_grad as value_and_grad,
)
from ._update import update as update

__all__ = ["grad", "value_and_grad", "update", "blame", "compare"]
