"""Complete training programs with mpx, each one script to be read from top to bottom.

* `vit`: a Vision Transformer in Equinox, by autocast.
* `vit_explicit`: the same with every cast written by hand, as a difference to `vit`.
* `gpt`: a GPT in Flax NNX, by autocast.
* `precisions`: what the scripts train in.
* `data`: images and text. `runs`: run folder, checkpoints, table, picture.
"""
