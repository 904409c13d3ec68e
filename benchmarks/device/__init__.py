"""What only a device can tell: `python -m benchmarks device`.

A device is lent for minutes, on a machine that differs from this one. So there are
*parts*, in order of worth, each a list of *cases*; every case is measured in a worker
that may fail, hang or be killed without harm to the others, and is written to the
results as soon as it is known. The next call goes on from there. Nothing here needs
more than JAX, Equinox, Optax and Rich: what else a case wants is looked for, and the
case skipped with the reason where it is missing.

- `plan`: the parts and their cases.
- `session`: the process that asks, within a budget, and writes.
- `measure`: the worker's side.
- `tables`: what the documentation shows.
"""
