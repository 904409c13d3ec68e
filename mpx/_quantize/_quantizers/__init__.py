"""Quantizers and recipes: from an array to low-precision values with scales.

In order of reading: `_array` is the result, `_kinds` has the quantizers, `_quantize`
applies one; `_recipes` selects quantizers for roles, `_delayed` adds a recipe with a
state; `_casting` quantizes by a device's own cast.
"""
