"""What works beside the library: nothing of mpx imports it.

`PallasKernel` quantizes for MXFP8 and NVFP4. No device has run it yet.
"""

from ._pallas import PallasKernel as PallasKernel
