"""A small GPT on Python source text, in float32 and under autocast, side by side.

Read the files in this order:

* `model`: a GPT in Flax NNX, as one writes it without a thought of mixed precision.
* `step`: the training step; mpx is here and nowhere else.
* `data`: the standard library's own source, byte by byte.
* `train`, `config`: what the training loop needs to know about a GPT, and options.
* `examples.common`: the loop, progress, checkpoints, results.

Run it with `python -m examples.gpt` and see `python -m examples.gpt --help`.
"""
