"""Weights in the files of inference engines, as a function multiplies them.

In order of reading:

* `_weights`: follows weights through a program, to the products that read them;
* `_formats`: what engines call the formats, and how they store them;
* `_files`: safetensors, one tensor at a time;
* `_export`: `mpx.export` and `mpx.import_weights` join these.
"""

from ._export import Exported, export, import_weights
