"""Products of data and a weight, quantized in both directions.

In order of reading: `_contraction` has the shapes of the three matmuls, `_operands` the
copies that they read, `_lowering` computes one of them on a device; `_product` has the
derivative rule, `_linear` the kinds of product; `_ahead` quantizes weights before a
product, `_paths` names the path of a product.
"""
