"""`mpx.export` writes the weights of a model; `mpx.import_weights` reads them back."""

import collections
import dataclasses
import functools
import itertools
import json
import math
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..._autocast import taking_notes
from ..._base.errors import describe, listing
from ..._base.tree import Guard, is_whole, path_text
from ..._base.typing import AnyArray, LeafPredicate, Shape
from ..._loss_scaling import AbstractLossScaling
from ..._nnx_graph import is_nnx_module, places
from ..._quantize import (
    AbstractProduct,
    Format,
    LinearProduct,
    QuantizedArray,
    Role,
    TensorQuantizer,
    may_read,
)
from ..._settings import with_ambient
from ..._step import inference
from ..._stored_weights import StoredWeight, dequantize_weights, is_stored
from .._inspect import trace
from .._report_files import aligned
from ._files import DTYPES, Stored, read, write
from ._formats import arrays_of, configuration, dequantized, group_of, inverted
from ._weights import Layout, Move, Use, moved, uses_of

_CALL = "`mpx.export(func, scaling, path)`"
_IMPORT = "`mpx.import_weights(path, like)`"
_MANIFEST, _VERSION = "mpx.json", 1
Name = Callable[[str, tuple[int, ...]], str]


@dataclasses.dataclass(frozen=True)
class Exported:
    """What `mpx.export` has written; `str` of it is a table.

    Attributes:
        path: The folder.
        tensors: What `mpx.json` says of each weight: its `name`; the `path` of the
            parameter and the `index` of the layer or expert; the `shape` and `format`;
            `why` it is not quantized; the names of its `arrays`.
        quantization_config: That of `config.json`; None if nothing is quantized.
    """

    path: pathlib.Path
    tensors: list[dict[str, Any]]
    quantization_config: dict[str, Any] | None

    def __str__(self) -> str:
        """Returns a row for each weight."""
        rows = [["weight", "shape", "format", "not quantized"]]
        for one in self.tensors:
            shape = "x".join(map(str, one["shape"]))
            rows.append([one["name"], shape, one["format"], one["why"]])
        return "\n".join(aligned(rows, {0, 1, 2, 3}))


def export(
    func: Callable[..., PyTree],
    scaling: AbstractLossScaling,
    path: str | os.PathLike[str],
    *,
    names: Mapping[str, str] | Name | None = None,
    config: Mapping[str, Any] | None = None,
    half: LeafPredicate | None = None,
    shard_bytes: int = 5_000_000_000,
) -> Callable[..., Exported]:
    r"""Returns a function that writes a model's weights as `func` multiplies them.

    Inference engines read the files: weights in FP8, int8, MXFP8 and NVFP4 with their
    scales, in the names of compressed-tensors, or of DeepSeek-V3 if all are in blocks
    of 128 x 128. Each array is bit-equal to the operand of the product that
    `mpx.inference(func, scaling)` computes:

    $$w \approx \mathrm{weight} \cdot \mathrm{weight\_scale}$$

    A matrix is [out, in], whatever its layout in the model. A weight that a scan cuts
    into layers, or with a matrix for each expert, is written as one tensor for each.
    The others have the dtype in which `func` reads them: half precision, if all
    operations do. Scales of inputs are written if they are known, under
    `mpx.DelayedScaling`.

    Args:
        func: What is served, of the model and other arguments: logits, not a loss.
        scaling: The loss scaling of the run, as in `mpx.inference`.
        path: A new folder. It gets `model.safetensors`, or several with an index;
            `config.json`; and `mpx.json`, which says what is not quantized and why, and
            which `mpx.import_weights` reads.
        names: The engine's names: a mapping from paths of parameters to names such as
            "model.layers.{}.mlp.up_proj.weight", with `{}` for the index of a layer; or
            a function of path and index. By default a name is the path, with the index
            after its first part: `blocks.3.mlp.up.weight`.
        config: The other entries of `config.json`.
        half: The leaves for which `half(path, leaf)` is True are not quantized.
        shard_bytes: The size of a file, if no tensor is larger.

    Returns:
        A function of the arguments of `func` that writes the files and returns a
        `mpx.reports.Exported`. Other arguments than the model may be
        `jax.ShapeDtypeStruct`s: nothing of the forward pass is computed. One weight is
        written after the other, without a copy of the model.

    Raises:
        FileExistsError: The folder exists.
        TypeError: An argument is of the wrong kind.
        ValueError: The state is of another model or recipe. A weight is computed before
            it is multiplied; is read in two precisions, or with two scales; has a
            format that engines do not read, or a side that blocks do not divide; or is
            not finite, if it is quantized or becomes so in half precision. Two weights
            have one name, or one has a dtype that files have not. The folder is not
            made then.

    Examples:
        >>> import jax.numpy as jnp, mpx, tempfile
        >>> predict = mpx.autocast(lambda w, x: jnp.tanh(x @ w["in"]) @ w["out"],
        ...                        recipe=mpx.Float8CurrentScaling())
        >>> w = {"in": jnp.ones((64, 128)), "out": jnp.ones((128, 8))}
        >>> folder = tempfile.mkdtemp() + "/model"
        >>> scaling = mpx.NoLossScaling()
        >>> found = mpx.export(predict, scaling, folder)(w, jnp.ones((4, 64)))
        >>> [(one["name"], one["format"], one["shape"]) for one in found.tensors]
        [('in', 'E4M3', (128, 64)), ('out', 'bfloat16', (8, 128))]

    Source: compressed-tensors and DeepSeek-V3 (names), Hugging Face (safetensors).
    """
    given = (("names", names), ("config", config), ("half", half))
    for name, value in given:
        fits = name != "half" and isinstance(value, Mapping)
        if not (fits or value is None or (callable(value) and name != "config")):
            raise TypeError(
                f"`{name}` of {_CALL} must be a "
                f"{'mapping' if name == 'config' else 'function'}; got "
                f"{describe(value)}."
            )
    folder, frozen = pathlib.Path(path), inference(func, scaling)

    def exporting(model: PyTree, *args: PyTree, **kwargs: PyTree) -> Exported:
        if folder.exists():
            raise FileExistsError(f"{_CALL}: `{folder}` exists. Choose a new folder.")
        leaves = {path: leaf for path, leaf in _named(model)[0] if _is_number(leaf)}
        types = [x for x in leaves.values() if isinstance(x, jax.ShapeDtypeStruct)]
        if not leaves or types:
            got = describe(types[0] if types else model)
            raise TypeError(f"{_CALL} needs a model with arrays; got {got}.")
        with taking_notes(), with_ambient(marks_weights=True):
            given = dequantize_weights(model), *args
            traced = trace(frozen, given, kwargs, lambda f: f, (0,), _CALL)
        uses: dict[str, list[Use]] = {path: [] for path in leaves}
        for use in uses_of(traced):
            # A model of one array has no path. Keys are not among the leaves.
            own = use.weight.path if use.weight.path in uses else ""
            uses.setdefault(own, []).append(use)
        # Taps of a convolution that the program slices are no layers.
        layers = {
            count
            for use in itertools.chain(*uses.values())
            for count, one in use.layers
            if use.layout is not None or one is None
        }
        parts: list[_Part] = []
        for name, leaf in leaves.items():
            is_half = half is not None and bool(half(name, leaf))
            of = name, leaf, uses[name], scaling._tokens(), is_half
            parts += _parts(*of, layers)
        return _write(folder, parts, _namer(names, leaves), config or {}, shard_bytes)

    return exporting


def _named(tree: PyTree) -> tuple[list[tuple[str, Any]], Any]:
    """Returns all leaves with their paths, and the form of the tree."""
    leaves, form = jax.tree.flatten(tree, is_leaf=is_whole)
    # Not of the arrays of a stored weight, and of an NNX Variable its own path.
    paths = places(jax.tree.unflatten(form, range(len(leaves))))
    return list(zip(map(path_text, paths), leaves, strict=True)), form


def _is_number(leaf: Any) -> bool:
    kinds = jax.Array | np.ndarray | StoredWeight | jax.ShapeDtypeStruct
    if not isinstance(leaf, kinds):
        return False
    return not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


# --- What is written ------------------------------------------------------------------


class _How(NamedTuple):
    """How a weight becomes arrays.

    Attributes:
        moves: From the weight to its operand.
        layout: How that becomes matrices; None: it is written as it is in the model.
        product: The quantized product; None: it is not quantized.
        dtype: The dtype of a weight that is not quantized.
    """

    moves: tuple[Move, ...] = ()
    layout: Layout | None = None
    product: AbstractProduct | None = None
    dtype: str = ""


class _Part(NamedTuple):
    """A weight, or one layer of it.

    Attributes:
        entry: What the manifest says of it.
        group: How it and its input are quantized; None if they are not.
        types: The types of its arrays, which have the axes of experts first.
        compute: Returns these arrays, and whether they are finite.
        batch: The axes of experts.
    """

    entry: dict[str, Any]
    group: dict[str, Any] | None
    types: dict[str, jax.ShapeDtypeStruct]
    compute: Callable[[], tuple[dict[str, AnyArray], AnyArray]]
    batch: Shape


def _parts(
    path: str,
    leaf: Any,
    uses: list[Use],
    scales: Mapping[Any, Any],
    is_half: bool,
    layers: set[int],
) -> Iterator[_Part]:
    """Yields the layers of a leaf of the model; `layers` are numbers of them.

    Raises:
        ValueError: One is read in several ways, or in a format that no engine reads.
    """
    is_floating = jnp.issubdtype(leaf.dtype, jnp.floating)
    cuts = {use.cut for use in uses}
    is_cut = is_floating and all(n in layers for use in uses for n, _ in use.layers)
    cut = cuts.pop() if is_cut and len(cuts) == 1 else ()
    sizes = [size for kind, (size, *_) in cut if kind == "layer"]
    for index in np.ndindex(*sizes):
        here = [use for use in uses if use.reads(index)]
        marked = [use for use in here if use.quantizer is not None and not is_half]
        matmuls = [use for use in marked or here if use.layout and use.cut == cut]
        use = next(iter((*matmuls, *here)), None)
        dtypes = {use.dtype for use in here}
        is_in_half = (
            is_floating and len(dtypes) == 1 and dtypes <= {"bfloat16", "float16"}
        )
        dtype = dtypes.pop() if is_in_half else str(leaf.dtype)
        why = "not read" if use is None else "in `half`" if is_half else use.why
        if not marked and np.dtype(dtype) not in DTYPES.values():
            raise ValueError(f"{_CALL}: `{path}` is {dtype}, which no file holds.")
        how, state, group = _How(cut, dtype=dtype), None, None
        whole = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        shape = jax.eval_shape(lambda x, i=index: moved(x, cut, i), whole).shape
        if matmuls and use is not None and use.layout is not None:
            shape = use.layout.in_file(use.weight.shape)
            moves = tuple(x for x in use.weight.moves if marked or x[0] != "cast")
            how = how._replace(moves=moves, layout=use.layout)
        if marked and (mark := marked[0].mark) is not None:
            _refuse_differences(f"{path}{[*index] or ''}", marked[0], here, cut, scales)
            how, state = how._replace(product=mark.product), scales.get(mark.slot)
            if state is not None and state.ndim > 1:
                state = state[tuple(marked[0].loops(index))]
        given = leaf, index, state
        leaves, tree = jax.tree.flatten(given)
        of = [(np.shape(x), str(jnp.result_type(x))) for x in leaves]
        q, types = _types(how, tree, *of)
        if q is not None and use is not None and use.mark is not None:
            inputs, why = use.mark.product.recipe.quantizer(Role.INPUT), ""
            try:
                group = group_of(q, shape, inputs, state is not None)
            except ValueError as error:
                raise ValueError(
                    f"{_CALL}: `{path}`, quantized at {use.where}: {error}. Write "
                    "it in half precision: `half=`."
                ) from error
            dtype = q.format.name
        entry = {"path": path, "whole": leaf.shape, "index": index, "shape": shape}
        entry |= {"format": dtype, "why": why, "moves": how.moves, "layout": how.layout}
        batch = next(iter(types.values())).shape[
            : how.layout.batch if how.layout else 0
        ]
        compute = functools.partial(_arrays, how, *given)
        yield _Part(entry, group, types, compute, batch)


def _refuse_differences(
    name: str, first: Use, here: list[Use], cut: Any, scales: Mapping[Any, Any]
) -> None:
    """Raises if one array cannot be what all operations read."""

    def key(use: Use) -> Any:
        slot = use.mark and use.mark.slot
        known = slot if slot in scales else None
        return use.quantizer, use.weight.moves, use.layout, known

    problem = "" if first.cut == cut else "in another way, too"
    for use in here:
        if use.quantizer is None:
            problem = f"in {use.dtype} at {use.where or 'another line'} ({use.why})"
        elif key(use) != key(first):
            problem = f"with other scales or blocks at {use.where}"
    if problem:
        raise ValueError(
            f"{_CALL}: `{name}` is quantized at {first.where}, and read {problem}. A "
            "file holds one of them: give each a parameter of its own, or write it in "
            "half precision by `half=`."
        )


# --- The arrays -----------------------------------------------------------------------


def _operand(how: _How, leaf: Any, index: Sequence[Any]) -> AnyArray:
    x = leaf.dequantize() if is_stored(leaf) else jnp.asarray(leaf)
    return moved(x, how.moves, index)


def _quantized(
    how: _How, leaf: Any, index: Sequence[Any], scales: AnyArray | None
) -> QuantizedArray:
    """Returns a weight as its product multiplies it, as [*batch, out, in]."""
    product, layout = how.product, how.layout
    assert product is not None and layout is not None
    if is_stored(leaf) and may_read(product, leaf.quantized) and not len(index):
        same = [move for move in how.moves if move[0] != "cast"]
        payload = layout.matrices(moved(leaf.quantized.payload, same, ()))
        return dataclasses.replace(leaf.quantized, payload=payload, guard=None)
    x = layout.matrices(_operand(how, leaf, index))
    batch = tuple(range(x.ndim - 2))
    numbers = ((x.ndim - 1,), (x.ndim - 2,)), (batch, batch)
    names = [field.name for field in dataclasses.fields(AbstractProduct)]
    same = {name: getattr(product, name) for name in names}
    same |= {"manual_axes": (), "out_sharding": None}
    matmul = LinearProduct(dimension_numbers=numbers, is_weight_first=True, **same)
    of = AbstractProduct._quantized, x, scales
    _, q, _ = matmul._on_target(*of, role=Role.WEIGHT, both=False)
    assert isinstance(q, QuantizedArray)  # `Use.quantizer`
    return q


@functools.lru_cache(maxsize=256)
def _types(how: _How, tree: Any, *types: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the types of a quantized weight and of its arrays; None if it is not."""
    given = jax.tree.unflatten(tree, [jax.ShapeDtypeStruct(*one) for one in types])
    of = [functools.partial(form, how) for form in (_quantized, _arrays)]
    q = None if how.product is None else jax.eval_shape(of[0], *given)
    return q, jax.eval_shape(of[1], *given)[0]


@functools.partial(jax.jit, static_argnums=0)
def _arrays(
    how: _How, leaf: Any, index: Sequence[Any], scales: AnyArray | None
) -> tuple[dict[str, AnyArray], AnyArray]:
    """Returns the arrays of a weight, and whether they are finite."""
    x, layout = _operand(how, leaf, index), how.layout
    if how.product is None or layout is None:
        y = x.astype(how.dtype)
        is_kept = jnp.all(jnp.isfinite(y) | ~jnp.isfinite(x))
        if layout is not None:
            matrices = layout.matrices(y)
            batch = matrices.shape[: layout.batch]
            y = matrices.reshape(*batch, *layout.in_file(x.shape))
        return {"": y}, is_kept
    q = _quantized(how, leaf, index, scales)
    arrays = arrays_of(q, layout.in_file(x.shape))
    is_finite = jnp.all(jnp.isfinite(q.dequantize()))
    inputs = how.product.recipe.quantizer(Role.INPUT)
    if scales is not None and inputs is not None and inputs.scale_from == "history":
        scale = scales[1:2] if scales.size > len(Role) else 1 / scales[:1]
        is_finite &= jnp.all(jnp.isfinite(scale))
        batch = q.payload.shape[: layout.batch]
        arrays["input_scale"] = jnp.broadcast_to(scale, (*batch, 1))
    return arrays, is_finite


# --- Names and files ------------------------------------------------------------------


def _namer(names: Mapping[str, str] | Name | None, leaves: Mapping[str, Any]) -> Name:
    """Returns the name of a parameter of this path, and layer of this index."""
    if callable(names):
        return names
    given = names or {}
    if unknown := sorted(given.keys() - leaves.keys()):
        raise ValueError(
            f"`names` of {_CALL} has {listing(unknown)}; the model has "
            f"{listing([*leaves])}."
        )

    def name(path: str, index: tuple[int, ...]) -> str:
        if path in given:
            try:
                return given[path].format(*index)
            except (IndexError, KeyError) as error:
                raise ValueError(
                    f"`names` of {_CALL}: {given[path]!r} does not fit `{path}`, which "
                    f"has {len(index)} indices."
                ) from error
        parts = re.findall(r"[^\[\]'\".]+", path) or ["weight"]
        first = 2 if parts[0] == "params" else 1  # the name of a collection of Flax
        return ".".join([*parts[:first], *map(str, index), *parts[first:]])

    return name


def _write(
    folder: pathlib.Path,
    parts: Sequence[_Part],
    name: Name,
    config: Mapping[str, Any],
    shard_bytes: int,
) -> Exported:
    """Writes the files to a folder that gets its name when all are there."""
    groups, plain, tensors, types = {}, [], [], []
    for part in parts:
        entry = part.entry
        for one in np.ndindex(*part.batch):
            own = name(entry["path"], (*entry["index"], *one))
            module = own.removesuffix(".weight")
            arrays = {key: f"{module}.{key}" if key else own for key in part.types}
            tensors.append({"name": own, **entry, "batch": one, "arrays": arrays})
            if part.group is not None:
                groups[module] = part.group
            elif len(entry["shape"]) > 1:
                plain.append(module)
            for key, x in part.types.items():
                own_shape = x.shape[len(part.batch) :]
                types.append(Stored(arrays[key], x.dtype, own_shape))
    counts = collections.Counter(one.name for one in types)
    if twice := [one for one, count in counts.items() if count > 1]:
        raise ValueError(
            f"`names` of {_CALL} must give each weight a name of its own; got "
            f"{listing(twice)} twice. Use `{{}}` for the index of a layer."
        )
    found = Exported(folder, tensors, configuration(groups, plain))
    if found.quantization_config is not None:
        config = {**config, "quantization_config": found.quantization_config}
    manifest = {"version": _VERSION, "tensors": tensors}
    contents = {"config.json": config, _MANIFEST: manifest}
    texts = {file: json.dumps(value, indent=1) for file, value in contents.items()}
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = pathlib.Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        write(made, types, _computed(parts), shard_bytes)
        for file, text in texts.items():
            (made / file).write_text(text)
        made.chmod(0o755)
        made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return found


def _computed(parts: Sequence[_Part]) -> Iterator[np.ndarray]:
    """Yields the arrays, computed one weight after the other."""
    for part in parts:
        arrays, is_finite = part.compute()
        if not is_finite:
            raise ValueError(
                f"{_CALL}: `{part.entry['path']}`{[*part.entry['index']] or ''} is not "
                f"finite in {part.entry['format']}, or its scales are not known before "
                "the first step."
            )
        for one in np.ndindex(*part.batch):
            for key, x in arrays.items():
                found = np.asarray(x[one] if one else x)
                yield inverted(found) if key == "weight_global_scale" else found


def import_weights(path: str | os.PathLike[str], like: PyTree) -> PyTree:
    """Reads weights that `mpx.export` has written, to evaluate or to train on.

    A weight in E4M3 with one scale is stored as it is in the file, as by
    `mpx.quantization.quantize_weights`. The others are dequantized in float32 and cast
    to the dtype in `like`; a recipe quantizes them again.

    Args:
        path: The folder.
        like: A model of the same structure and shapes, also of `jax.ShapeDtypeStruct`s.
            Its leaves give the dtypes, and shardings if they have any.

    Returns:
        The model; keys and what is no array are those of `like`.

    Raises:
        ModuleNotFoundError: The package safetensors is not installed.
        ValueError: The folder is not from `mpx.export`, a file is damaged, or the model
            is another one.

    Examples:
        >>> import jax.numpy as jnp, mpx, tempfile
        >>> func = mpx.autocast(lambda w, x: x @ w, recipe=mpx.Float8CurrentScaling())
        >>> w, folder = jnp.ones((64, 128)), tempfile.mkdtemp() + "/model"
        >>> _ = mpx.export(func, mpx.NoLossScaling(), folder)(w, jnp.ones((4, 64)))
        >>> found = mpx.import_weights(folder, w)
        >>> found.shape, found.nbytes
        ((64, 128), 8196)
    """
    folder = pathlib.Path(path)
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{_IMPORT} needs a folder that `mpx.export` wrote: {error}"
        ) from error
    if manifest.get("version") != _VERSION:
        raise ValueError(f"{_IMPORT}: version {manifest.get('version')} is unknown.")
    files, by_path = read(folder), collections.defaultdict[str, list[Any]](list)
    for entry in manifest["tensors"]:
        by_path[entry["path"]].append(entry)
    leaves, form = _named(like)
    found = [leaf for _, leaf in leaves]
    is_nnx = any(map(is_nnx_module, jax.tree.leaves(like, is_leaf=is_nnx_module)))
    for number, (name, leaf) in enumerate(leaves):
        if _is_number(leaf):
            x = _imported(leaf, name, by_path.pop(name, []), files)
            found[number] = x.dequantize() if is_nnx and is_stored(x) else x
    if by_path:
        raise ValueError(
            f"`like` of {_IMPORT} must be a model like the exported one; it has no "
            f"{listing([*by_path])}."
        )
    return jax.tree.unflatten(form, found)


def _imported(
    leaf: Any, path: str, entries: list[Any], files: Mapping[str, np.ndarray]
) -> Any:
    """Returns a leaf of the model from its entries."""
    shape = tuple(entries[0]["whole"]) if entries else "absent"
    if leaf.shape != shape:
        raise ValueError(
            f"`like` of {_IMPORT} must be a model like the exported one; `{path}` is "
            f"{describe(leaf)}, and {shape} in the files."
        )
    whole: Any = None
    scale: Any = None
    numbers = np.arange(math.prod(leaf.shape)).reshape(leaf.shape)
    for entry in entries:
        if missing := [x for x in entry["arrays"].values() if x not in files]:
            raise ValueError(f"{_IMPORT}: {listing(missing)} is in no file.")
        arrays = {key: files[name] for key, name in entry["arrays"].items()}
        found = arrays[""] if "" in arrays else dequantized(arrays)
        moves = [move for move in entry["moves"] if move[0] != "cast"]
        here = moved(numbers, moves, entry["index"])
        if entry["layout"] is not None:
            axes, *rest = entry["layout"]
            here = Layout(axes, *rest).matrices(here)[tuple(entry["batch"])]
        given = arrays.get("weight_scale")
        is_one = given is not None and given.shape == (1,) and len(entries) == 1
        if is_one and entry["format"] == "E4M3":
            found, scale = arrays["weight"], given
        whole = np.empty(leaf.shape, found.dtype) if whole is None else whole
        whole.reshape(-1)[here.reshape(-1)] = found.reshape(-1)
    sharding = getattr(leaf, "sharding", None)
    if scale is None:
        return jax.device_put(whole.astype(leaf.dtype), sharding)
    of = jax.device_put(whole, sharding), jnp.asarray(scale[0]), None
    form = {"format": Format.E4M3, "dtype": np.dtype(leaf.dtype)}
    quantized = QuantizedArray(*of, Guard(jnp.ones((), bool)), **form)
    return StoredWeight(quantized, TensorQuantizer())
