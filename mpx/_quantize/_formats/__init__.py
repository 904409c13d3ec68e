"""Formats of 8 bits and fewer: rounding, blocks, scales, and devices.

In order of reading: `_format` has the formats and checks of options; `_rounding` rounds
to them, `_blocks` computes scales of whole arrays and of blocks, `_hadamard` is the
transform of NVFP4; `_target` names devices; `_arithmetic` is the arithmetic of
quantizers.
"""
