"""Adapters: names and signatures of other packages, and what frameworks must know."""
