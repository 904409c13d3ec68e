"""Adapters: names and signatures of other packages, and Flax serialization."""
