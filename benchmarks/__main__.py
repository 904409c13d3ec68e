"""`python -m benchmarks`: `device` has a command line of its own.

A lent device's machine has JAX, and lacks what the others are parsed with.
"""

import sys


def main() -> int:
    """Runs the benchmarks; returns 1 where a goal was missed, 2 after an error."""
    if sys.argv[1:2] == ["device"]:
        from .device import command

        return command.main(sys.argv[2:])
    from . import command

    return command.main()


if __name__ == "__main__":
    sys.exit(main())
