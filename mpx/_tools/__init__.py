"""Tools that inspect a step and its results; training does not need them.

Without a run, in order of reading:

* `_inspect`: `mpx.explain`, the precision and cost of each operation.
* `_counter`: compiles for a device without one, and counts in the compiled program.
* `_expect`: `mpx.expect`, claims about a compiled step.
* `_forecast`: `mpx.forecast`, memory and time of a step on a device.

With values:

* `_blame`: `mpx.blame`, the cause of a skipped step.
* `_watch`: `mpx.monitor` and `mpx.compare`, the magnitude and accuracy of values.
* `_guard`: `mpx.guard`, checks a state before it is saved.

`_doctor` checks the installation; `_report_files` writes reports to files.
"""
