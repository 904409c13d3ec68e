"""What the examples share: everything around a training step.

* `config`: the options that every run has.
* `training`: optimizer, loss scaling and devices.
* `loop`: the loop over the steps, with metrics, checkpoints and tests.
* `command`: the program around it, which Ctrl-C may interrupt.
* `display`, `plot`, `record`, `checkpoint`: what a person sees and what is kept.
"""
