"""Whether `mpx.export` writes what `mpx.inference` multiplies, bit for bit.

An interpreter of its own, which knows nothing of how mpx follows weights, runs the
program of inference. It keeps what operations read that depends on one parameter alone,
and by which scale the result of a product is multiplied. Files are compared with that.
"""

import json
import pathlib
import tempfile
from collections.abc import Sequence
from itertools import permutations
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

import mpx

from . import gradients, measure
from .record import Built, Client

EXPORTED = """
equinox_mlp equinox_transformer equinox_batch_norm equinox_gru equimo_vit
linen_vit linen_resnet linen_lstm linen_scanned_layers nnx_transformer nnx_gru
haiku_lstm haiku_attention optax_ctc jraph_attention keras_transformer
tokamax_attention tokamax_ragged_dot gemma_3 griffin mamba_2 penzai_llama
transformers_gpt2 transformers_llama
""".split()
"""Programs of each kind of package: modules, plain trees, scans and experts."""
_CALLS = """checkpoint closed_call custom_jvp_call custom_vjp_call custom_vmap_call jit
pjit remat2""".split()
_MOVES = """broadcast_in_dim convert_element_type copy dynamic_slice expand_dims name
optimization_barrier reshape slice squeeze stop_gradient transpose""".split()
_DTYPES = {"F8_E4M3": "float8_e4m3fn", "BF16": "bfloat16", "F32": "float32"}
_DTYPES |= {"I32": "int32", "U32": "uint32", "U8": "uint8", "BOOL": "bool"}


class Value(NamedTuple):
    """A value of a program.

    Attributes:
        array: The array.
        of: The parameters that it depends on; "" stands for all other arguments.
        made: Of a product a list of what it read; of one of two scalars a tuple of
            these.
    """

    array: Any
    of: frozenset[str] = frozenset()
    made: Any = None


class Read(NamedTuple):
    """What an operation reads of one parameter.

    Attributes:
        path: The parameter.
        arrays: The operand; of a product its matrices, [out, in].
        scale: None or one, the scale of a quantized operand.
    """

    path: str
    arrays: list[Any]
    scale: list[Any]


class Program:
    """Runs a program, and keeps what it reads."""

    def __init__(self) -> None:
        self.reads: list[Read] = []

    def run(self, program: Any, given: Sequence[Value]) -> list[Value]:
        """Returns the results of a program."""
        jaxpr, consts = (
            getattr(program, "jaxpr", program),
            getattr(program, "consts", ()),
        )
        known = {v: Value(x) for v, x in zip(jaxpr.constvars, consts, strict=True)}
        known |= dict(zip(jaxpr.invars, given, strict=True))

        def read(atom: Any) -> Value:
            return Value(atom.val) if isinstance(atom, core.Literal) else known[atom]

        for equation in jaxpr.eqns:
            results = self._results(equation, [*map(read, equation.invars)])
            known |= dict(zip(equation.outvars, results, strict=True))
        return [*map(read, jaxpr.outvars)]

    def _results(self, equation: Any, given: list[Value]) -> list[Value]:
        name, params = equation.primitive.name, equation.params
        if name in _CALLS:
            names = "jaxpr", "call_jaxpr", "call"
            return self.run(next(params[x] for x in names if x in params), given)
        if name == "scan" and params["length"]:
            return self._scan(params, given)
        params = equation.primitive.get_bind_params(params)
        found = equation.primitive.bind(*(v.array for v in given), **params)
        found = found if equation.primitive.multiple_results else [found]
        of, made = _of(given), given[0].made if given and name in _MOVES else None
        if name == "mul":
            made = _multiplied(*given)
        if name not in _MOVES or found[0].size != np.size(given[0].array):
            reads = [self._read(equation, *one) for one in enumerate(given)]
            made = reads[:2] if name in measure.PRODUCTS else made
        return [Value(x, of, made) for x in found]

    def _scan(self, params: dict[str, Any], given: list[Value]) -> list[Value]:
        count, end = params["num_consts"], params["num_consts"] + params["num_carry"]
        consts, carry, xs = given[:count], given[count:end], given[end:]
        turns = range(params["length"])
        found: dict[int, list[Value]] = {}
        for i in reversed(turns) if params["reverse"] else turns:
            cut = [Value(x.array[i], x.of) for x in xs]
            results = self.run(params["jaxpr"], [*consts, *carry, *cut])
            carry, found[i] = results[: len(carry)], results[len(carry) :]
        ys = zip(*(found[i] for i in turns), strict=True)
        return [*carry, *(Value(jnp.stack([v.array for v in y]), _of(y)) for y in ys)]

    def _read(self, equation: Any, side: int, value: Value) -> Read | None:
        """Keeps an operand that depends on one parameter and nothing else."""
        if len(value.of) != 1 or "" in value.of:
            return None
        x, (axes, batch) = value.array, _axes(equation, side, value.array.ndim)
        x = x.transpose(axes)
        arrays = [x[one] for one in np.ndindex(x.shape[:batch])]
        (path,) = value.of
        self.reads.append(Read(path, arrays, []))
        return self.reads[-1]


def _of(values: Sequence[Value]) -> frozenset[str]:
    return frozenset().union(*(v.of for v in values))


def _multiplied(*values: Value) -> tuple[Any, ...] | None:
    """Two scalars; None for others, among which a product takes its scales."""
    if not any(np.ndim(v.array) for v in values):
        return tuple(v.array for v in values)
    for one, other in (values, values[::-1]):
        if isinstance(one.made, list) and isinstance(other.made, tuple):
            for read, scale in zip(one.made, other.made, strict=True):
                if read is not None:
                    read.scale[:] = [jnp.reshape(scale, 1)]
    return None


def _axes(equation: Any, side: int, rank: int) -> tuple[Sequence[int], int]:
    """The axes of an operand as [*batch, *out, *in], and the number of batches."""
    params, groups = equation.params, ()
    numbers = params.get("dimension_numbers")
    if equation.primitive.name == "conv_general_dilated" and side:
        return numbers.rhs_spec, 0
    if equation.primitive.name.startswith("ragged_dot") and side:
        numbers = params["ragged_dot_dimension_numbers"]
        groups, numbers = numbers.rhs_group_dimensions, numbers.dot_dimension_numbers
    elif equation.primitive.name != "dot_general":
        return range(rank), 0
    summed, batch = (pair[side] for pair in numbers)
    if not summed:  # a multiplication
        return range(rank), 0
    batch = *batch, *groups
    out = [i for i in range(rank) if i not in (*batch, *summed)]
    return (*batch, *out, *summed), len(batch)


def _reads(serve: Any, built: Built, paths: list[str]) -> dict[str, list[Read]]:
    """What inference reads of each parameter."""
    arrays, static = eqx.partition((built.params, built.batch), eqx.is_array)
    kept = Program()
    rest: frozenset[str] = frozenset(("",))

    def flat(arrays: Any) -> Any:
        params, batch = eqx.combine(arrays, static)
        return eqx.filter(jax.tree.leaves(serve(params, *batch)), eqx.is_array)

    def watched(arrays: Any) -> Any:
        names, of = iter(paths), [rest] * len(jax.tree.leaves(arrays))
        for place, x in enumerate(jax.tree.leaves(arrays[0])):
            of[place] = rest if _is_key(x) else frozenset((next(names),))
        kept.run(program, [*map(Value, jax.tree.leaves(arrays), of)])
        return [(read.arrays, read.scale) for read in kept.reads]

    program = jax.make_jaxpr(flat)(arrays)
    options: Any = measure.LESS
    compiled = jax.jit(watched).lower(arrays).compile(compiler_options=options)
    found: dict[str, list[Read]] = {path: [] for path in paths}
    pairs = zip(kept.reads, jax.device_get(compiled(arrays)), strict=True)
    for read, numbers in pairs:
        found[read.path].append(Read(read.path, *numbers))
    return found


def _is_key(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def _files(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """The tensors of a file: its package reads FP8 into PyTorch only."""
    raw = (folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    found = json.loads(raw[8:start])
    found.pop("__metadata__")
    for name, entry in found.items():
        first, last = (start + place for place in entry["data_offsets"])
        found[name] = np.frombuffer(raw[first:last], jnp.dtype(_DTYPES[entry["dtype"]]))
    return found


def _wrong(tensors: list[Any], files: dict[str, Any], reads: list[Read]) -> list[str]:
    """Those of one parameter that inference does not read in these bits."""
    plain, quantized, wrong = set(), {}, []
    for read in reads:
        for array in map(np.ravel, read.arrays):
            if read.scale:
                quantized[np.concatenate([array, *read.scale]).tobytes()] = None
            plain.add((str(array.dtype), array.tobytes()))
    for place, entry in enumerate(tensors):
        arrays = {key: files[name] for key, name in entry["arrays"].items()}
        if "" in arrays:
            x = arrays[""].reshape(entry["shape"])
            turns = (x.transpose(one) for one in permutations(range(x.ndim)))
            same = any((str(x.dtype), turned.tobytes()) in plain for turned in turns)
        else:  # layers and experts in their order
            x = arrays["weight"].astype(np.float32)
            x = np.concatenate([x, arrays["weight_scale"]])
            same = [*quantized][place : place + 1] == [x.tobytes()]
        if not same and entry["why"] != "not read":
            wrong.append(entry["name"])
    return wrong


def _compared(built: Built, precision: str) -> dict[str, Any]:
    """Exports a program, and compares files and results with those of inference."""
    loss, step = (
        gradients.wrapped(built, precision),
        gradients.autocast(built, precision),
    )
    scaling = step.state
    if scaling is not None:
        train = measure.Compiled(step, built, options=measure.LESS)
        for _ in range(2):
            given = scaling, built.params, built.batch
            results = train.program(eqx.filter(given, eqx.is_array))
            scaling, _ = eqx.combine(results, train.rest)
    scaling = scaling or mpx.NoLossScaling()

    def served(params: Any, *batch: Any) -> Any:
        return loss(params, *batch)[1]

    serve = mpx.inference(served, scaling)
    with tempfile.TemporaryDirectory() as parent:
        folder = pathlib.Path(parent) / "model"
        tensors = mpx.export(served, scaling, folder)(
            built.params, *built.batch
        ).tensors
        files = _files(folder)
        imported = mpx.import_weights(folder, built.params)
    by_path: dict[str, list[Any]] = {}
    for entry in tensors:
        by_path.setdefault(entry["path"], []).append(entry)
    reads, run = _reads(serve, built, [*by_path]), eqx.filter_jit(serve)
    results = [run(x, *built.batch) for x in (built.params, imported)]
    expected, found = ([*map(measure._to_host, jax.tree.leaves(x))] for x in results)
    return {
        "tensors": len(tensors),
        "quantized": sum("" not in x["arrays"] for x in tensors),
        "not read": sum(x["why"] == "not read" for x in tensors),
        "layers": sum(len(x["index"]) > 0 for x in tensors),
        "wrong": [x for p, of in by_path.items() for x in _wrong(of, files, reads[p])],
        "same output": all(map(np.array_equal, expected, found)),
        "output": measure.distance(found, expected),
    }


def measure_exports(client: Client) -> dict[str, Any]:
    """Exports a program; some under delayed scaling, too, after two steps."""
    built, record = client.make(), {"program": client.name}
    for precision in ("current", "delayed")[: 1 + client.layouts]:
        record[precision] = measure.attempt(lambda p=precision: _compared(built, p))
    return record
