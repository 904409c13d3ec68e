"""Calls of attention, one for each thing that a call can say and for pairs of them."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..reference.attention import attention as oracle

BATCH, LENGTH, KEYS, HEADS, SIZE = 2, 6, 6, 4, 8


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """A call of attention, by the shapes of its bias and mask."""

    name: str
    keys: int = KEYS
    groups: int = HEADS  # how many heads keys and values have
    bias: tuple[int, ...] | None = None
    mask: tuple[int, ...] | None = None
    blind: bool = False  # whether queries of the first row see no key by the mask
    options: Any = ()
    lengths: tuple[Any, Any] = (None, None)  # of queries and of keys

    def arrays(self, dtype: Any, seed: int = 0) -> dict[str, Any]:
        random = np.random.default_rng(seed)
        kv = BATCH, self.keys, self.groups, SIZE
        shapes = {"query": (BATCH, LENGTH, HEADS, SIZE), "key": kv, "value": kv}
        found = {
            name: jnp.asarray(random.normal(size=shape), dtype)
            for name, shape in shapes.items()
        }
        if self.bias is not None:
            found["bias"] = jnp.asarray(random.normal(size=self.bias), dtype)
        if self.mask is not None:
            mask = random.random(self.mask) < 0.7
            mask[..., 0] = True
            if self.blind:
                mask[0, :, :2] = False
            found["mask"] = jnp.asarray(mask)
        return found

    def said(self) -> dict[str, Any]:
        names = ("query_seq_lengths", "key_value_seq_lengths")
        pairs = zip(names, self.lengths, strict=True)
        lengths = {n: jnp.array(x, jnp.int32) for n, x in pairs if x is not None}
        return {**dict(self.options), **lengths}

    def exact(self, arrays: dict[str, Any], cotangent: Any, **more: Any) -> Any:
        """What the oracle makes of it: result, rows, gradients."""
        said = self.said()
        ours = ("local_window_size", "query_seq_lengths", "key_value_seq_lengths")
        names = zip(("window", "query_lengths", "key_lengths"), ours, strict=True)
        new = {name: said.pop(mine, None) for name, mine in names}
        inputs = {name: np.asarray(x, np.float64) for name, x in arrays.items()}
        if "mask" in inputs:
            inputs["mask"] = np.asarray(arrays["mask"])
        return oracle(**inputs, cotangent=cotangent, **said, **new, **more)


CAUSAL = {"is_causal": True}
FULL = (BATCH, HEADS, LENGTH, KEYS)
CASES = {
    case.name: case
    for case in (
        AttentionCase("plain"),
        AttentionCase("scale", options={"scale": 0.7}),
        AttentionCase("groups", groups=2),
        AttentionCase("one group", groups=1, options=CAUSAL),
        AttentionCase("causal", options=CAUSAL),
        AttentionCase("causal, more keys", keys=9, groups=2, options=CAUSAL),
        AttentionCase("causal, fewer keys", keys=4, options=CAUSAL),
        AttentionCase("shared bias", bias=(1, HEADS, LENGTH, KEYS), options=CAUSAL),
        AttentionCase("bias of keys", bias=(BATCH, 1, 1, KEYS), groups=2),
        AttentionCase("mask of keys", mask=(BATCH, 1, 1, KEYS), options=CAUSAL),
        AttentionCase("blind", mask=(BATCH, 1, LENGTH, KEYS), blind=True),
        AttentionCase(
            "blind and causal", mask=(BATCH, 1, 1, KEYS), blind=True, options=CAUSAL
        ),
        AttentionCase("blind with a bias", mask=FULL, bias=FULL, blind=True),
        AttentionCase("lengths", lengths=([6, 3], [2, 6])),
        AttentionCase("lengths of queries", lengths=([0, 3], None), options=CAUSAL),
        AttentionCase("lengths, causal", lengths=([6, 3], [4, 0]), options=CAUSAL),
        AttentionCase("lengths and a mask", lengths=([5, 3], [4, 6]), mask=FULL),
        AttentionCase(
            "lengths and a bias", lengths=(None, [4, 0]), bias=(1, 1, LENGTH, KEYS)
        ),
        AttentionCase("window", options={"local_window_size": (2, 1)}),
        AttentionCase("causal window", options={**CAUSAL, "local_window_size": 2}),
        AttentionCase(
            "causal window, fewer keys",
            keys=2,
            options={**CAUSAL, "local_window_size": 1},
        ),
        AttentionCase(
            "causal window and a mask",
            options={**CAUSAL, "local_window_size": 3},
            mask=(BATCH, 1, LENGTH, KEYS),
            blind=True,
        ),
        AttentionCase(
            "window and lengths",
            options={**CAUSAL, "local_window_size": (1, 1)},
            lengths=(None, [3, 6]),
        ),
    )
}
