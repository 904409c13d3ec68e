"""Names and signatures of other packages, as thin adapters over mpx."""
