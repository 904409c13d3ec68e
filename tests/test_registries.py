"""The registries have all of mpx, and one line in them is enough."""

import dataclasses
import importlib.util
from pathlib import Path

import pytest

import mpx

from . import registries

# Modules that go through every recipe.
OF_EVERY_RECIPE = (
    "autocast/test_inner_derivatives.py",
    "autocast/test_recipes.py",
    "nn/test_recipes.py",
    "test_end_to_end.py",
    "step/test_recipe_overflow.py",
)


@dataclasses.dataclass(frozen=True)
class NewRecipe(mpx.quantization.AbstractRecipe):
    def _quantizer(self, role, leg):
        return mpx.quantization.TensorQuantizer()


def test_every_recipe_quantizer_and_format_of_mpx_is_registered():
    def of(kind):
        found = [x for face in (mpx, mpx.quantization) for x in vars(face).values()]
        classes = (x for x in found if isinstance(x, type) and issubclass(x, kind))
        return {x for x in classes if not x.__name__.startswith("Abstract")}

    assert set(map(type, registries.RECIPES.values())) == of(
        mpx.quantization.AbstractRecipe
    )
    assert set(map(type, registries.QUANTIZERS.values())) == of(
        mpx.quantization.Quantizer
    )
    others = {mpx.Format.HYBRID, mpx.Format.INT8}
    assert set(registries.FORMATS.values()) == set(mpx.Format) - others


def imported_again(file):
    path = Path(__file__).parent / file
    name = ".".join(("tests", *Path(file).parent.parts, "imported_again"))
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(module)


def parameters(namespace):
    """All names that the tests of a module are parametrized with."""
    marks = [
        mark
        for function in namespace.values()
        for mark in getattr(function, "pytestmark", ())
        if mark.name == "parametrize"
    ]
    cases = [getattr(case, "values", case) for mark in marks for case in mark.args[1]]
    several = [case if isinstance(case, tuple) else (case,) for case in cases]
    return {value for case in several for value in case if isinstance(value, str)}


@pytest.mark.parametrize("file", OF_EVERY_RECIPE)
def test_one_line_has_a_new_recipe_tested(file, monkeypatch):
    for registry in (registries.RECIPES, registries.STATELESS):
        monkeypatch.setitem(registry, "new", NewRecipe())
    monkeypatch.setitem(registries.PRECISIONS, "new", {"recipe": NewRecipe()})
    assert "new" in parameters(imported_again(file))
