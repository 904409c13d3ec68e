"""Attention and its gradients in NumPy float64, one row of scores at a time.

Vaswani et al., "Attention Is All You Need", 2017, equation 1; gradients by the chain
rule. A query that sees no key attends evenly to what its place lets it see, or else to
all, and its scores have no gradient.
"""

import numpy as np


def sees(place, other, is_causal, window):
    """Whether the key at one place comes neither too late nor too early for another."""
    if is_causal and other > place:
        return False
    if window is None:
        return True
    left, right = (window, window) if isinstance(window, int) else window
    return place - left <= other <= place + right


def attention(
    query,
    key,
    value,
    cotangent,
    bias=None,
    mask=None,
    scale=None,
    is_causal=False,
    window=None,
    query_lengths=None,
    key_lengths=None,
    keep=None,
    rate=0.0,
):
    """The result, the logarithms of the rows, and the gradients of all floats."""
    q, k, v, g = (np.asarray(x, np.float64) for x in (query, key, value, cotangent))
    (batch, length, heads, size), keys = q.shape, k.shape[1]
    share = heads // k.shape[2]
    scale = size**-0.5 if scale is None else scale
    full = (batch, heads, length, keys)
    b = np.broadcast_to(0.0 if bias is None else np.asarray(bias, np.float64), full)
    m = np.broadcast_to(True if mask is None else np.asarray(mask), full)
    kept = np.ones(full) if keep is None else np.asarray(keep) / (1 - rate)
    out, rows = np.zeros(q.shape), np.zeros((batch, length, heads))
    dq, dk, dv, db = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape), 0 * b
    for i, h, t in np.ndindex(batch, heads, length):
        if query_lengths is not None and t >= query_lengths[i]:
            continue
        group = h // share
        order = np.array([sees(t, s, is_causal, window) for s in range(keys)])
        seen = order & m[i, h, t]
        if key_lengths is not None:
            seen &= np.arange(keys) < key_lengths[i]
        scores = scale * (k[i, :, group] @ q[i, t, h]) + b[i, h, t]
        is_blind = not seen.any()
        if is_blind:
            scores, seen = 0 * scores, order if order.any() else np.full(keys, True)
        top = scores[seen].max()
        p = np.where(seen, np.exp(np.where(seen, scores, top) - top), 0)
        rows[i, t, h] = top + np.log(p.sum())
        p /= p.sum()
        dropped = p * kept[i, h, t]
        out[i, t, h] = dropped @ v[i, :, group]
        dv[i, :, group] += np.outer(dropped, g[i, t, h])
        if is_blind:
            continue
        dp = kept[i, h, t] * (v[i, :, group] @ g[i, t, h])
        ds = p * (dp - p @ dp)
        db[i, h, t] += ds
        dq[i, t, h] = scale * ds @ k[i, :, group]
        dk[i, :, group] += scale * np.outer(ds, q[i, t, h])
    gradients = [dq, dk, dv]
    if bias is not None:
        summed = [i for i, n in enumerate(np.shape(bias)) if n == 1]
        gradients.append(db.sum(axis=tuple(summed), keepdims=True))
    return out, rows, gradients
