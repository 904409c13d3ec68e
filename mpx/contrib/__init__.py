"""Additions outside the library's core: nothing of mpx imports them.

`PallasKernel` (`_pallas`) quantizes for MXFP8 and NVFP4 (`_four_bits`), tile by tile
(`_tiles`). No device has run it yet.
"""

from ._pallas import PallasKernel as PallasKernel
