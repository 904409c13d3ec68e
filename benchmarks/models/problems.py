"""What is trained: the two Vision Transformers of the paper's evaluation."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Problem:
    """A model and the images it is trained on (paper, section 5).

    Attributes:
        title: for tables and pictures.
        image_shape: height, width, channels.
        classes: number of logits.
        width: features of a token.
        hidden: neurons of the MLP's hidden layer.
        heads: attention heads.
        patch: side of a patch in pixels.
    """

    title: str
    image_shape: tuple[int, int, int]
    classes: int
    width: int
    hidden: int
    heads: int
    patch: int


PROBLEMS = {
    "desktop": Problem(
        "desktop ViT (width 256, hidden 800) on CIFAR-100",
        image_shape=(32, 32, 3),
        classes=100,
        width=256,
        hidden=800,
        heads=4,
        patch=4,
    ),
    "base": Problem(
        "ViT-Base (width 768, hidden 3072) on ImageNet",
        image_shape=(224, 224, 3),
        classes=1000,
        width=768,
        hidden=3072,
        heads=12,
        patch=16,
    ),
    # Not of the paper: small enough to train here, for tests.
    "tiny": Problem(
        "tiny ViT (width 16, hidden 32) on 8x8 images",
        image_shape=(8, 8, 1),
        classes=10,
        width=16,
        hidden=32,
        heads=2,
        patch=4,
    ),
}
