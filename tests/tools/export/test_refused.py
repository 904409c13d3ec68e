"""What `mpx.export` refuses, and leaves no folder of; and odd models that it takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import mpx
from tests.helpers import unchecked_annotations
from tests.tools.export import cases, reader
from tests.tools.export.cases import (
    FP8,
    LAYERS,
    MLP,
    NONE,
    RECIPES,
    X,
    layers,
    low,
    normal,
)

W = {"w": normal(64, 64)}
IDS = jnp.arange(8, dtype=jnp.int32)


def tied(model, x):
    return jnp.tanh(model["table"][x] @ model["w"]) @ model["table"].T


TIED = {"table": normal(96, 64), "w": normal(64, 64, seed=1)}


def twice(w, x):
    return jnp.tanh(x @ w) @ w


def by_shards(model, x):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": (P("d"), P(None, "d")), "out_specs": P()}
    inner = lambda w, x: jax.lax.psum(x @ w, "d")  # noqa: E731
    return jax.shard_map(inner, mesh=mesh, **specs)(model["w"], x)


def of(func, model=W, x=X, scaling=NONE, recipe=FP8, **options):
    """A call of `mpx.export`, given the folder."""
    func = low(func, recipe)
    return lambda path: mpx.export(func, scaling, path, **options)(model, x)


def spoiled(value):
    return {**MLP, "up": MLP["up"].at[3, 4].set(value)}


def at(size):
    return {"model": {"w": normal(size, 64)}, "x": normal(8, size)}


DELAYED = RECIPES["delayed"]


def of_another_model(path):
    scaling = cases.scaling_of(layers, DELAYED, LAYERS)
    return of(cases.mlp, MLP, scaling=scaling, recipe=DELAYED)(path)


times = lambda model, x: x @ model["w"]  # noqa: E731
REFUSED = {
    r"`\['table'\]` is quantized at .* and read in float32": of(tied, TIED, IDS),
    r"`\['w'\]` is quantized at .* with other scales or blocks": of(
        lambda model, x: jnp.tanh(x @ model["w"]) @ model["w"].T
    ),
    r"`\['w'\]`.*40 is not a multiple of its blocks of 32": of(
        times, recipe=RECIPES["mxfp8"], **at(40)
    ),
    r"`\['w'\]`.*40 is not a multiple of its blocks of 16": of(
        times, recipe=RECIPES["nvfp4"], **at(40)
    ),
    "quantizes a weight that the function computes": of(
        lambda model, x: twice(model["w"] / jnp.linalg.norm(model["w"]), x)
    ),
    "or cuts by `jax.shard_map`": of(by_shards),
    r"`\['up'\]`.* is not finite in E4M3": of(cases.mlp, spoiled(np.nan)),
    r"`\['up'\]` is not finite in E4M3, or its": of(cases.mlp, spoiled(np.inf)),
    "`names` .* has `up`; the model has": of(cases.mlp, MLP, names={"up": "a"}),
    r"`names` .* name of its own; got `same\.weight`": of(
        cases.mlp, MLP, names=lambda path, index: "same.weight"
    ),
    "`{}` for the index of a layer": of(
        layers, LAYERS, names={"['layers']": "same.weight"}
    ),
    "`scaling` of .* must be the state of this model": of_another_model,
    "init_scaling": of(cases.mlp, MLP, recipe=DELAYED),
    r"`\['c'\]`.*complex64": of(times, {**W, "c": jnp.ones(3, jnp.complex64)}),
}


@pytest.mark.parametrize("match", REFUSED)
def test_what_is_refused_leaves_no_folder(match: str, tmp_path):
    with pytest.raises(ValueError, match=match):
        REFUSED[match](tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_arguments_of_the_wrong_kind(tmp_path):
    for wrong in ({"names": 3}, {"half": "up"}, {"config": 3}):
        match = f"`{[*wrong][0]}` of `mpx.export"
        with unchecked_annotations(), pytest.raises(TypeError, match=match):
            of(cases.mlp, MLP, **wrong)(tmp_path / "model")
    with pytest.raises(TypeError, match="needs a model with arrays"):
        of(lambda model, x: x, {})(tmp_path / "model")
    assert not list(tmp_path.iterdir())
    of(cases.mlp, MLP)(tmp_path / "model")
    with pytest.raises(FileExistsError, match="Choose a new folder"):
        of(cases.mlp, MLP)(tmp_path / "model")


# --- Odd models -----------------------------------------------------------------------


def test_without_a_recipe_all_weights_are_in_half_precision(tmp_path):
    func = mpx.autocast(tied, jnp.bfloat16)
    found = mpx.export(func, NONE, tmp_path / "model", config={"a": 1})(TIED, IDS)
    assert found.quantization_config is None
    arrays = reader.tensors(tmp_path / "model")
    assert arrays.keys() == {"table", "w"}  # one tensor for both of its uses
    expected = np.asarray(TIED["w"].astype(jnp.bfloat16)).T
    np.testing.assert_array_equal(arrays["w"], expected)
    assert (tmp_path / "model" / "config.json").read_text() == '{\n "a": 1\n}'


def test_tied_weights_may_be_written_in_half_precision(tmp_path):
    found = of(tied, TIED, IDS, half=lambda path, leaf: "table" in path)
    tensors = {one["name"]: one for one in found(tmp_path / "model").tensors}
    assert tensors["w"]["format"] == "E4M3" and not tensors["w"]["why"]
    assert tensors["table"]["why"] == "in `half`"
    assert reader.tensors(tmp_path / "model")["table"].shape == (96, 64)
    assert reader.dequantized(tmp_path / "model").keys() == {"w"}


@pytest.mark.parametrize("recipe", [None, FP8])
def test_a_model_in_float16_keeps_its_dtype(recipe, tmp_path):
    model = jax.tree.map(lambda x: x.astype(jnp.float16), MLP)
    of_first = lambda model, x: cases.mlp(model[0], x)  # noqa: E731
    func, x = mpx.autocast(of_first, jnp.float16, recipe=recipe), X.astype(jnp.float16)
    found = mpx.export(func, NONE, tmp_path / "model")((model, IDS), x)
    formats = {one["name"]: one["format"] for one in found.tensors}
    up = "float16" if recipe is None else "E4M3"
    assert formats == {"0.up": up, "0.down": "float16", "1": "int32"}


def test_names_have_the_index_of_a_layer(tmp_path):
    names = {"['layers']": "model.layers.{}.mlp.weight", "['head']": "lm_head.weight"}
    of(layers, LAYERS, names=names)(tmp_path / "model")
    found = reader.dequantized(tmp_path / "model")
    assert found.keys() == {f"model.layers.{i}.mlp" for i in range(3)} | {"lm_head"}
    numbers = np.asarray(LAYERS["layers"][1].T)
    assert np.abs(found["model.layers.1.mlp"] - numbers).max() < 0.04


def test_scales_before_the_first_step(tmp_path):
    """They are those of `mpx.inference`, which warns; or are not known."""
    scaling = cases.scaling_of(layers, DELAYED, LAYERS, steps=0)
    with pytest.warns(UserWarning, match="before its first step"):
        of(layers, LAYERS, scaling=scaling, recipe=DELAYED)(tmp_path / "model")
    arrays = reader.tensors(tmp_path / "model")
    assert {float(arrays[f"layers.{i}.weight_scale"][0]) for i in range(3)} == {1.0}
    warm = mpx.DelayedScaling(warm_start=True)
    scaling = cases.scaling_of(layers, warm, LAYERS, steps=0)
    with pytest.raises(ValueError, match="scales are not known before the first"):
        of(layers, LAYERS, scaling=scaling, recipe=warm)(tmp_path / "warm")
    assert not (tmp_path / "warm").exists()


def test_quantized_matmuls_of_activations_have_no_weight(tmp_path):
    attention = lambda model, x: jax.nn.softmax((x @ model["w"]) @ x.mT) @ x  # noqa: E731
    dpa = mpx.Float8CurrentScaling(fp8_dpa=True)
    func = mpx.autocast(attention, jnp.bfloat16, recipe=dpa)
    found = mpx.export(func, NONE, tmp_path / "model")(W, X)
    assert [one["format"] for one in found.tensors] == ["E4M3"]


def test_a_weight_of_two_products_and_a_model_that_is_one_array(tmp_path):
    of(lambda model, x: twice(model["w"], x))(tmp_path / "twice")
    assert reader.dequantized(tmp_path / "twice").keys() == {"w"}
    of(lambda model, x: x @ model, W["w"])(tmp_path / "array")
    assert reader.dequantized(tmp_path / "array")["weight"].shape == (64, 64)


MERGED = {"w": normal(64, 64), "a": normal(64, 4), "b": normal(4, 64)}


@pytest.mark.parametrize("rules", [None, cases.EVERY], ids=["recipe", "all matmuls"])
def test_merged_weights_are_refused(rules, tmp_path):
    merged = lambda m, x: twice(m["w"] + m["a"] @ m["b"], x)  # noqa: E731
    func = mpx.autocast(merged, jnp.bfloat16, recipe=FP8, rules=rules)
    with pytest.raises(ValueError, match="quantizes a weight that the function comp"):
        mpx.export(func, NONE, tmp_path / "model")(MERGED, X)
