"""What a compiled program needs of a device's memory."""

from typing import Any


def memory(compiled: Any) -> int:
    """Bytes of arguments, results that are in none of them, and temporaries."""
    sizes = _sizes(compiled)
    return (
        sizes.argument_size_in_bytes
        + sizes.output_size_in_bytes
        - sizes.alias_size_in_bytes
        + sizes.temp_size_in_bytes
    )


def _sizes(compiled: Any) -> Any:
    sizes = compiled.memory_analysis()
    if sizes is None:
        raise RuntimeError(
            "`memory(compiled)` needs an executable with a memory analysis; this "
            "backend has none. Compile for one of `TARGETS`."
        )
    return sizes
