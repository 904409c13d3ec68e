"""The MLP, GPT and ViT of `models.on_cpu` in PyTorch: float32, and its autocast.

Imported only in an environment of its own, `.venv-torch`, which has no JAX.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

FLOAT32, AUTOCAST = "PyTorch float32", "PyTorch autocast"
_gelu = functools.partial(functional.gelu, approximate="tanh")  # as jax.nn's default
_linear = functools.partial(nn.Linear, bias=False)


class Block(nn.Module):
    """Attention and MLP, each behind a norm, with a residual."""

    def __init__(self, sizes: Any):
        super().__init__()
        width, hidden = sizes.width, sizes.hidden
        self.heads, self.is_causal = sizes.heads, sizes.model == "gpt"
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = _linear(width, 3 * width), _linear(width, width)
        self.up, self.down = _linear(width, hidden), _linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(self.norms[0](x)).chunk(3, -1)
        heads = (
            one.unflatten(-1, (self.heads, -1)).transpose(1, 2).contiguous()
            for one in split
        )
        mixed = functional.scaled_dot_product_attention(
            *heads, is_causal=self.is_causal
        )
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(_gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    """Of sizes as in `models.on_cpu`, with its data; called, it gives the loss."""

    def __init__(self, sizes: Any):
        super().__init__()
        rows, tokens, width = sizes.rows, sizes.tokens, sizes.width
        self.kind = sizes.model
        if self.kind == "mlp":
            self.layers = nn.ModuleList(
                _linear(width, width) for _ in range(sizes.layers)
            )
            self.x, self.wanted = torch.randn(rows, width), torch.randn(rows, width)
            return
        self.layers = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.head = _linear(width, sizes.classes)
        if self.kind == "gpt":
            self.embed = nn.Embedding(sizes.classes, width)
            texts = torch.randint(sizes.classes, (rows, tokens + 1))
            self.x, self.wanted = texts[:, :-1], texts[:, 1:].flatten()
        else:
            self.embed = _linear(sizes.patch, width)
            self.x = torch.randn(rows, tokens, sizes.patch)
            self.wanted = torch.randint(sizes.classes, (rows,))

    def forward(self) -> Tensor:
        if self.kind == "mlp":
            *first, last = self.layers
            x = functools.reduce(lambda x, layer: _gelu(layer(x)), first, self.x)
            return functional.mse_loss(last(x).float(), self.wanted)
        x = self.embed(self.x)
        for block in self.layers:
            x = block(x)
        logits = self.head(x.flatten(0, 1) if self.kind == "gpt" else x.mean(1))
        return functional.cross_entropy(logits.float(), self.wanted)


def built(sizes: Any, names: list[str]) -> Iterator[tuple[str, Any, float]]:
    """Of each arm: its name, what runs a step, and its gradients' error."""
    exact = None
    for name in names:
        torch.manual_seed(0)
        model = Model(sizes)
        _differentiate(model, name)()
        gradients = torch.cat([one.grad.flatten() for one in model.parameters()])
        exact = gradients if exact is None else exact
        error = (gradients - exact).norm() / exact.norm()
        yield name, _step(model, name), float(error)


def _differentiate(model: Model, name: str) -> Callable[[], None]:
    def differentiate() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=name == AUTOCAST):
            loss = model()
        loss.backward()

    return differentiate


def _step(model: Model, name: str) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    differentiate = _differentiate(model, name)

    def step() -> None:
        optimizer.zero_grad()
        differentiate()
        optimizer.step()

    return step
