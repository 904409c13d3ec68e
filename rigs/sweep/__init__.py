"""Sweeps functions of JAX and its libraries: is `mpx.autocast` as good as it can be?

Each case is one function between two products, on one kind of input. Its values and
gradients under `mpx.autocast` are compared with those of the *ideal* (`ideal.py`): the
same program whose products are rounded to half precision and nothing else. Run it with
`python -m rigs.sweep`.
"""
