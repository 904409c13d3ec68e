"""One process: measures programs of one module, and prints a record a line.

What a package prints goes to standard error. If the process dies, the one that started
it knows which program it was at, and starts another one for the rest.
"""

import json
import os
import sys
import warnings
from typing import Any


def answer(request: dict[str, Any], say: Any) -> None:
    """Measures what a request asks for: `module`, `programs`, `task`, `options`."""
    from .exports import measure_exports
    from .layouts import measure_layouts
    from .measure import attempt, measure
    from .programs import programs_of

    found = programs_of(request["module"])
    tasks = {"layouts": measure_layouts, "exports": measure_exports}
    task = tasks.get(request["task"], measure)
    for name in request["programs"]:
        say({"begin": name})
        record = attempt(lambda n=name: task(found[n], **request["options"]))
        say({"program": name, "record": record})


def main() -> None:
    """Reads one request from standard input."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what packages print

    def say(line: Any) -> None:
        print(json.dumps(line), file=out, flush=True)

    warnings.simplefilter("ignore")
    answer(json.load(sys.stdin), say)


if __name__ == "__main__":
    main()
