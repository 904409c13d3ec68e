"""Takes the pictures of a report for docs/explain.md: `python -m tests.screenshots`.

Needs Chromium. Nothing is computed: the training step of a ViT is traced.
"""

import dataclasses
import subprocess
import tempfile
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp

import mpx
from examples import runs
from examples.vit import (
    PRESETS,
    ModelConfig,
    VisionTransformer,
    initial_state,
    make_step,
)

from .browser import BROWSER

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
MODEL = ModelConfig(patch=4, width=384, hidden=1536, blocks=6, heads=6)
CONFIG = dataclasses.replace(PRESETS["digits"], model=MODEL)


def make_report() -> mpx.reports.Report:
    """The report of a step on images of 32 by 32 pixels."""
    batch = {
        "image": jax.ShapeDtypeStruct((64, 32, 32, 3), jnp.float32),
        "label": jax.ShapeDtypeStruct((64,), jnp.int32),
    }

    def state() -> object:
        model = VisionTransformer(MODEL, (32, 32, 3), 100, jax.random.key(0))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), batch)
        return initial_state(CONFIG, "bfloat16", model, zeros)

    step = make_step(CONFIG, "bfloat16", runs.data_mesh())
    return mpx.explain(step)(batch, eqx.filter_eval_shape(state))


def main() -> None:
    """Writes the pictures."""
    with tempfile.TemporaryDirectory() as folder:
        for scheme in ("light", "dark"):
            page = Path(folder) / f"{scheme}.html"
            text = make_report().to_html()
            text = text.replace('<html lang="en">', f'<html data-scheme="{scheme}">')
            page.write_text(text, encoding="utf-8")
            picture = PICTURES / f"explain-{scheme}.png"
            subprocess.run(
                [
                    BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu",
                    f"--user-data-dir={folder}/profile", "--hide-scrollbars",
                    "--virtual-time-budget=3000", "--window-size=1280,900",
                    f"--screenshot={picture}", page.as_uri(),
                ],
                check=True,
                capture_output=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
