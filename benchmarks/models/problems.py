"""What is trained: the two Vision Transformers of the paper's evaluation.

The model is the one of `vit.py` beside this file, and it is always that file: with our
`mpx`, with the published MPX (whose package has the same name, so that the file picks
it up in the peers' environment), and with none at all.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

_MODEL_FILE = Path(__file__).resolve().parent / "vit.py"


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The shape of a Vision Transformer, as in `examples.vit`."""

    patch: int
    width: int
    hidden: int
    blocks: int
    heads: int
    dropout: float


@dataclasses.dataclass(frozen=True)
class Problem:
    """A model and the images it is trained on (paper, section 5).

    Attributes:
        name: the word on the command line.
        title: for tables and pictures.
        image_shape: height, width, channels.
        classes: number of logits.
        width: features of a token.
        hidden: neurons of the MLP's hidden layer.
        heads: attention heads.
        patch: side of a patch in pixels.
        blocks: blocks of the full model; a measurement may take fewer.
    """

    name: str
    title: str
    image_shape: tuple[int, int, int]
    classes: int
    width: int
    hidden: int
    heads: int
    patch: int
    blocks: int

    def config(self, blocks: int, dropout: float) -> ModelConfig:
        """The shape of the model with so many blocks."""
        shape = (self.patch, self.width, self.hidden, blocks, self.heads, dropout)
        return ModelConfig(*shape)


PROBLEMS = {
    problem.name: problem
    for problem in (
        Problem(
            "desktop",
            "desktop ViT (width 256, hidden 800) on CIFAR-100",
            image_shape=(32, 32, 3),
            classes=100,
            width=256,
            hidden=800,
            heads=4,
            patch=4,
            blocks=12,
        ),
        Problem(
            "base",
            "ViT-Base (width 768, hidden 3072) on ImageNet",
            image_shape=(224, 224, 3),
            classes=1000,
            width=768,
            hidden=3072,
            heads=12,
            patch=16,
            blocks=12,
        ),
        # Not of the paper: small enough to train here, for tests.
        Problem(
            "tiny",
            "tiny ViT (width 16, hidden 32) on 8x8 images",
            image_shape=(8, 8, 1),
            classes=10,
            width=16,
            hidden=32,
            heads=2,
            patch=4,
            blocks=1,
        ),
    )
}


def _do_nothing(func: Callable[..., Any], return_dtype: Any = None) -> Callable:
    del return_dtype
    return func


@functools.cache
def model_module(with_mpx: bool) -> ModuleType:
    """`vit.py`, with the `mpx` of this environment or with none.

    The float32 step that everything is compared with must not pay for mpx, when it is
    traced too. So the file is loaded a second time and `force_full_precision`, the one
    name of mpx in it, does nothing there.
    """
    name = (
        "benchmarks.models._vit_with" if with_mpx else "benchmarks.models._vit_without"
    )
    spec = importlib.util.spec_from_file_location(name, _MODEL_FILE)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"the benchmarks need {_MODEL_FILE}; it is missing")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not with_mpx:
        vars(module)["mpx"] = SimpleNamespace(force_full_precision=_do_nothing)
    return module


def make_model(
    problem: Problem, config: ModelConfig, key: Any, *, with_mpx: bool
) -> Any:
    """The initial model."""
    return model_module(with_mpx).VisionTransformer(
        config, problem.image_shape, problem.classes, key
    )
