"""The same programs on eight devices: how weights and examples lie on them.

A layout makes another program of one, whose arrays are laid out; its gradients must be
those of one device. Where a program of float32 does not run in a layout (most libraries
do not say how the results of their products lie on explicit axes), neither is it asked
of the other precisions.

In `shard_map` a program is written twice: mpx around the function that holds
`shard_map`, and mpx and the derivative inside of it.
"""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import mpx

from . import gradients, measure
from .gradients import Result, Step
from .record import Built, Client

PRECISIONS = ("bfloat16", "float16", "delayed")
OUTSIDE, INSIDE = "mpx around shard_map", "mpx in shard_map"


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a program lies on the devices.

    Attributes:
        axes: The mesh.
        weights: Which axis of the mesh divides the weights, if any, and whether it is
            their first axis that can be divided, or the last one.
        kind: Of the axes of the mesh, or where mpx stands in `shard_map`.
    """

    axes: dict[str, int]
    weights: tuple[str, str] | None
    kind: AxisType | str

    @property
    def mesh(self) -> Any:
        """The mesh over the devices of this process."""
        kind = self.kind if isinstance(self.kind, AxisType) else AxisType.Auto
        shape = tuple(self.axes.values())
        return jax.make_mesh(shape, tuple(self.axes), (kind,) * len(shape))

    @property
    def is_fsdp(self) -> bool:
        """Whether weights lie on the axis of the examples."""
        return self.weights is not None and self.weights[0] == "data"

    def spec(self, leaf: Any) -> Any:
        """How a weight is divided."""
        if self.weights is None or leaf.ndim == 0:
            return P()
        axis, side = self.weights
        for i in range(leaf.ndim) if side == "first" else [leaf.ndim - 1]:
            if leaf.shape[i] % self.axes[axis] == 0:
                return P(*[axis if i == j else None for j in range(leaf.ndim)])
        return P()


_ONE, _TWO = {"data": 8}, {"data": 2, "model": 4}
_FIRST, _LAST = ("data", "first"), ("model", "last")
LAYOUTS = {
    "data parallel": Layout(_ONE, None, AxisType.Auto),
    "data parallel, explicit axes": Layout(_ONE, None, AxisType.Explicit),
    f"data parallel, {OUTSIDE}": Layout(_ONE, None, OUTSIDE),
    f"data parallel, {INSIDE}": Layout(_ONE, None, INSIDE),
    "FSDP": Layout(_ONE, _FIRST, AxisType.Auto),
    "FSDP, explicit axes": Layout(_ONE, _FIRST, AxisType.Explicit),
    f"FSDP, {OUTSIDE}": Layout(_ONE, _FIRST, OUTSIDE),
    f"FSDP, {INSIDE}": Layout(_ONE, _FIRST, INSIDE),
    "tensor parallel": Layout(_TWO, _LAST, AxisType.Auto),
    "tensor parallel, explicit axes": Layout(_TWO, _LAST, AxisType.Explicit),
}


def step_in(layout: Layout, built: Built, precision: str) -> tuple[Step, Built]:
    """A step of a precision in a layout, and the program with its arrays laid out."""
    mesh = layout.mesh
    arrays, static = eqx.partition(built.params, eqx.is_array)
    specs = jax.tree.map(layout.spec, arrays)
    batch_specs = jax.tree.map(lambda _: P("data"), built.batch)

    def put(x: Any, spec: Any) -> Any:
        return jax.device_put(x, NamedSharding(mesh, spec))

    params = jax.tree.map(put, arrays, specs)
    batch = jax.tree.map(put, built.batch, batch_specs)

    def loss(params: Any, *batch: Any) -> Any:
        if layout.is_fsdp and layout.kind is not AxisType.Auto:
            gather = functools.partial(_gather, layout)
            params = jax.tree.map(gather, params, specs)
        value, outputs = built.loss(eqx.combine(params, static), *batch)
        if layout.kind == OUTSIDE:
            value = jax.lax.pmean(value, "data")
        return value, outputs

    def mapped(params: Any, *batch: Any) -> Any:
        specs_in, specs_out = (specs, *batch_specs), (P(), P("data"))
        return jax.shard_map(loss, mesh=mesh, in_specs=specs_in, out_specs=specs_out)(
            params, *batch
        )

    if layout.kind == INSIDE:
        step = _inside(Built(loss, params, batch), mesh, specs, batch_specs, precision)
        return step, Built(loss, params, batch)
    laid = Built(mapped if layout.kind == OUTSIDE else loss, params, batch)
    return _step(laid, precision), laid


def _gather(layout: Layout, leaf: Any, spec: Any) -> Any:
    """A whole weight on every device."""
    if layout.kind is AxisType.Explicit:
        return jax.sharding.reshard(leaf, P())
    for axis, name in enumerate(spec):
        if name is not None:
            return jax.lax.all_gather(leaf, name, axis=axis, tiled=True)
    return leaf


def _inside(
    laid: Built, mesh: Any, specs: Any, batch_specs: Any, precision: str
) -> Step:
    """The whole step in `shard_map`; gradients are averaged by hand, in float32."""
    if precision == "float32":
        differentiate = gradients.gradient(laid.loss)
    else:
        loss = gradients.wrapped(laid, precision)
        differentiate = gradients.differentiated(loss, precision)
    devices = mesh.shape["data"]

    def mean(grad: Any, spec: Any) -> Any:
        # Of a divided weight the sum was made where it was gathered.
        return grad / devices if any(spec) else jax.lax.pmean(grad, "data")

    def local(state: Any, params: Any, batch: Any) -> Any:
        state, result = differentiate(state, params, batch)
        finite = jax.lax.pmin(result.finite.astype(jnp.int32), "data") > 0
        value = jax.lax.pmean(result.value, "data")
        return state, (value, jax.tree.map(mean, result.grads, specs), finite)

    def run(state: Any, params: Any, batch: Any) -> Any:
        state, (value, grads, finite) = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(P(), specs, batch_specs),
            out_specs=(P(), (P(), specs, P())),
            check_vma=False,
        )(state, params, batch)
        return state, Result(value, (), grads, finite)

    return Step(run, mpx.DynamicLossScaling() if precision == "float16" else None)


def _step(built: Built, precision: str) -> Step:
    if precision == "float32":
        return gradients.plain(built)
    return gradients.autocast(built, precision)


def _error(step: Step, built: Built, expected: Result) -> dict[str, Any]:
    result = measure.Compiled(step, built)(built)
    return {"gradient": measure.distance(result.grads, expected.grads)}


def _measure_one(
    layout: Layout, built: Built, precision: str, expected: Result
) -> dict[str, Any]:
    with jax.set_mesh(layout.mesh):
        return _error(*step_in(layout, built, precision), expected)


def measure_layouts(client: Client) -> dict[str, Any]:
    """Gradient errors of a program in every layout, against float32 on one device."""
    built = client.make()
    expected = measure.Compiled(gradients.plain(built), built)(built)
    found: dict[str, Any] = {"one device": {}}
    for precision in PRECISIONS:
        found["one device"][precision] = measure.attempt(
            lambda p=precision: _error(_step(built, p), built, expected)
        )
    for name, layout in LAYOUTS.items():
        found[name] = {}
        for precision in ("float32", *PRECISIONS):
            if layout.kind == INSIDE and precision == "delayed":
                continue  # its histories belong to the whole step
            run = functools.partial(_measure_one, layout, built, precision, expected)
            found[name][precision] = measure.attempt(run)
            if "error" in found[name]["float32"]:
                break
    return {"program": client.name, "package": client.package, "layouts": found}
