"""A GPT so small that thousands of steps take seconds."""

import sysconfig
from pathlib import Path

from examples.gpt import Config, ModelConfig
from examples.runs import ScalingConfig

CONFIG = Config(
    steps=20,
    batch_size=16,
    warmup_steps=2,
    log_every=3,
    checkpoint_every=5,
    test_texts=16,
    data_path=Path(sysconfig.get_paths()["stdlib"]) / "json",
    model=ModelConfig(context=8, width=8, hidden=8, blocks=1, heads=2, dropout=0.2),
    scaling=ScalingConfig(initial=2.0**20, period=3),  # the first steps overflow
)
