"""Additions outside the library's core: nothing of mpx imports them.

`PallasKernel` quantizes for MXFP8 and NVFP4. No device has run it yet.
"""

from ._pallas import PallasKernel as PallasKernel
