"""A Vision Transformer trained in float32, float16 and bfloat16, side by side.

Read the files in this order:

* `model`: the ViT of the MPX paper. The only trace of mixed precision in it is
  `mpx.force_full_precision` around softmax, layer norm and the mean.
* `step`: the training step, the same for every precision.
* `train`: the loop around it (data, progress, checkpoints).
* `config`, `datasets`, `checkpoint`, `report`, `plot`: what a program needs besides.

Run it with `python -m examples.vit` and see `python -m examples.vit --help`.
"""
