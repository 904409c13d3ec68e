"""Two precisions of a loss of NNX objects: `mpx.nnx.compare`."""

import jax
import pytest
from flax import nnx

import mpx
import mpx.nnx

from ..helpers import slow_but
from .cases import Normed, Tied, assert_equal, batch, loss_fn

pytestmark = pytest.mark.third_party


def loss(model, x, y):
    return loss_fn(model, x, y)[0]


RECIPE = mpx.autocast(loss, recipe=mpx.DelayedScaling(warm_start=True))


def model():
    return Normed(nnx.Rngs(0))


def names(model):
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(model, nnx.Param))
    paths = [jax.tree_util.keystr(p, simple=True, separator=".") for p, _ in leaves]
    return sorted(p.removesuffix(".value").replace(".0.", "[0].") for p in paths)


@pytest.mark.parametrize("func", slow_but([RECIPE], [RECIPE, loss]))
def test_layers_and_gradients_have_their_names_and_objects_are_unchanged(func):
    net = model()
    before = jax.tree.map(jax.numpy.copy, nnx.state(net))
    policy = "bfloat16" if func is loss else None
    found = mpx.nnx.compare(loss, func, policy=policy)(net, *batch(0))
    assert sorted(gradient.name for gradient in found.gradients) == names(net)
    assert found.activations
    worst = min(x.snr for x in found if not x.is_noise)
    assert 5 < worst < 70 and found.floor > 70
    assert_equal(nnx.state(net), before)


@pytest.mark.slow
def test_a_function_differs_from_itself_by_nothing_with_the_state_of_a_run():
    net = model()
    scaling = mpx.init_scaling(RECIPE, net, *batch(0))
    result = mpx.nnx.value_and_grad(RECIPE, scaling)(net, *batch(0))

    def with_aux(model, *data):
        return loss(model, *data), model

    func = mpx.autocast(with_aux, recipe=mpx.DelayedScaling(warm_start=True))
    compare = mpx.nnx.compare(with_aux, func, result.scaling, has_aux=True)
    found = compare(net, *batch(0))
    plain, low = found.losses
    assert low == pytest.approx(plain, rel=0.1) and low != plain
    same = mpx.nnx.compare(loss, loss, mpx.NoLossScaling(), policy="float32")
    assert all(x.snr > 100 or x.is_noise for x in same(net, *batch(0)))


@pytest.mark.parametrize("tool", ["blame", "compare"])
def test_the_tools_of_trees_name_those_of_objects(tool):
    first = loss if tool == "compare" else mpx.autocast(loss)
    other = mpx.autocast(loss) if tool == "compare" else mpx.NoLossScaling()
    call = getattr(mpx, tool)(first, other)
    with pytest.raises(TypeError, match=f"use `mpx.nnx.{tool}`, with the same arg"):
        call(model(), *batch(0))
    if tool == "blame":
        mpx.nnx.blame(first, other)(model(), *batch(0))


def test_the_advice_to_split_says_that_weights_are_renamed():
    with pytest.raises(TypeError, match="`nnx.split` renames the weights"):
        mpx.filter_grad(loss, mpx.NoLossScaling())(model(), *batch(0))


def test_the_state_of_a_module_is_not_that_of_its_parts():
    net = Tied(nnx.Rngs(0))  # which changes nothing in itself
    scaling = mpx.init_scaling(RECIPE, net, *batch(0))
    graph, weights, rest = nnx.split(net, nnx.Param, ...)

    @mpx.autocast(recipe=mpx.DelayedScaling(warm_start=True))
    def parts(weights, *data):
        return loss(nnx.merge(graph, weights, rest), *data)

    with pytest.raises(ValueError, match="`nnx.split` renames weights.*nnx.blame"):
        mpx.filter_grad(parts, scaling)(weights, *batch(0))


def test_a_method_is_refused_for_both():
    net = model()
    for pair in ((net, loss), (loss, net)):
        with pytest.raises(TypeError, match="`mpx.nnx.compare` needs a function that"):
            mpx.nnx.compare(*pair)
