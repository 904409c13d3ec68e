"""Equimo: vision models in Equinox."""

import jax

from ..data import cross_entropy, labels, normal
from ..record import client


def classifier(key, model):
    """The loss of a model that takes one image and a key."""
    keys = jax.random.split(key, 3)

    def loss(model, x, y, key):
        run = lambda x, key: model(x, key=key, inference=True)  # noqa: E731
        logits = jax.vmap(run)(x, jax.random.split(key, x.shape[0]))
        return cross_entropy(logits, y), logits

    x, y = normal(keys[0], 4, 3, 16, 16), labels(keys[1], 4, classes=8)
    return loss, model, (x, y, keys[2])


@client(linear=True)
def equimo_vit(key):
    from equimo.models.vit import VisionTransformer

    model = VisionTransformer(
        img_size=16,
        in_channels=3,
        dim=32,
        patch_size=4,
        num_heads=[4],
        depths=[2],
        num_classes=8,
        key=key,
    )
    return classifier(key, model)


@client(linear=True)
def equimo_convnext(key):
    from equimo.models.convnext import ConvNeXt

    model = ConvNeXt(in_channels=3, dims=[8, 16], depths=[1, 1], num_classes=8, key=key)
    return classifier(key, model)
