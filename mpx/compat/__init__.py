"""Adapters: names of other packages (`jmp`, `jaxamp`) and `flax.serialization`."""
