"""The Vision Transformers of the MPX paper (section 5): defaults of `--preset`.

AdamW with linear warmup and cosine decay, as "How to train your ViT?" (Steiner et al.
2021, section 3) has it.
"""

from typing import Any

CIFAR100: dict[str, Any] = {
    "steps": 40_000,
    "batch_size": 256,
    "learning_rate": 1e-3,
    "warmup_steps": 2_000,
    "weight_decay": 0.05,
    "clip": 1.0,
    "workers": 4,
    "checkpoint_every": 1_000,
}
CIFAR100_MODEL: dict[str, Any] = {
    "patch": 4,
    "width": 256,
    "hidden": 800,
    "blocks": 12,
    "heads": 4,
    "dropout": 0.1,
}
IMAGENET: dict[str, Any] = {
    "steps": 375_000,  # 300 passes at batch size 1,024
    "batch_size": 1_024,
    "learning_rate": 1e-3,
    "warmup_steps": 10_000,
    "weight_decay": 0.1,
    "clip": 1.0,
    "workers": 32,
    "checkpoint_every": 5_000,
}
IMAGENET_MODEL: dict[str, Any] = {
    "patch": 16,
    "width": 768,
    "hidden": 3072,
    "blocks": 12,
    "heads": 12,
    "dropout": 0.1,
}
