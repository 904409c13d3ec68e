"""CPU seconds on the host: tracing, lowering, compiling."""
