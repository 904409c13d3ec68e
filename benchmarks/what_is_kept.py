"""The picture of what a step keeps: bytes for each weight, by part."""

from __future__ import annotations

from pathlib import Path

# Weights, what is kept beside them, gradients, moments of Adam: in bytes.
_PARTS = ("weights", "beside them", "gradients", "moments")
_MOMENTS = 2 + 2 / 32  # codes, and a float32 scale for each 128
CONFIGURATIONS = {
    "float32": (4, 0, 4, 8),
    "bfloat16, masters": (2, 4, 2, 8),
    "float32, 8-bit moments": (4, 0, 4, _MOMENTS),
    "bfloat16 + 16 bits, 8-bit moments": (2, 2, 2, _MOMENTS),
    "bfloat16 + 8 bits, 8-bit moments": (2, 1, 2, _MOMENTS),
    "bfloat16, 8-bit moments": (2, 0, 2, _MOMENTS),
}
# Okabe and Ito (2008).
_COLORS = ("#0072B2", "#56B4E9", "#999999", "#E69F00")


def draw(path: Path) -> None:
    """Draws the bars of all configurations."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2))
    axes = figure.subplots()
    names, ends = list(CONFIGURATIONS), [0.0] * len(CONFIGURATIONS)
    for number, (part, color) in enumerate(zip(_PARTS, _COLORS, strict=True)):
        sizes = [each[number] for each in CONFIGURATIONS.values()]
        axes.barh(names, sizes, left=ends, color=color, label=part)
        ends = [end + size for end, size in zip(ends, sizes, strict=True)]
    for row, end in enumerate(ends):
        axes.text(end + 0.15, row, f"{round(end, 2):g}", va="center")
    axes.invert_yaxis()
    axes.set_xlim(0, 18)
    axes.set_xlabel("bytes for each weight, Adam")
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=140, metadata={"Software": None})
