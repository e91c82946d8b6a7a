"""Tensor-parallel building blocks of language models: ``Layer`` objects with declared weights.

Names load lazily, so that plugins can name this package without importing torch.
"""
