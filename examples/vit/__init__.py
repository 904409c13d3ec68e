"""A Vision Transformer trained in float32, float16 and bfloat16, side by side.

Read the files in this order:

* `model`: the ViT of the MPX paper. The only trace of mixed precision in it is
  `mpx.force_full_precision` around softmax, layer norm and the mean.
* `plain_model`: the same without it, for `--style autocast`.
* `step`: the training step, the same for every precision.
* `train`: what the training loop needs to know about a ViT.
* `config`, `datasets`: options and images.
* `examples.common`: the loop, progress, checkpoints, results.

Run it with `python -m examples.vit` and see `python -m examples.vit --help`.
"""
