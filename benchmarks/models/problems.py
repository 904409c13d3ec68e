"""What is trained: the two Vision Transformers of the paper's evaluation."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Problem:
    """A model and the images it is trained on (paper, section 5).

    Attributes:
        name: of the model, for tables and pictures.
        images: their name.
        image_shape: height, width, channels.
        classes: number of logits.
        width: features of a token.
        hidden: neurons of the MLP's hidden layer.
        heads: attention heads.
        patch: side of a patch in pixels.
    """

    name: str
    images: str
    image_shape: tuple[int, int, int]
    classes: int
    width: int
    hidden: int
    heads: int
    patch: int

    @property
    def title(self) -> str:
        """The model and its images in words."""
        sizes = f"width {self.width}, hidden {self.hidden}"
        return f"{self.name} ({sizes}) on {self.images}"


PROBLEMS = {
    "desktop": Problem("desktop ViT", "CIFAR-100", (32, 32, 3), 100, 256, 800, 4, 4),
    "base": Problem("ViT-Base", "ImageNet", (224, 224, 3), 1000, 768, 3072, 12, 16),
    # Not of the paper: small enough to train here, for tests.
    "tiny": Problem("tiny ViT", "8x8 images", (8, 8, 1), 10, 16, 32, 2, 4),
}
