"""What a model architecture is: its configuration, its interface, its checkpoint.

Names load lazily, so that plugins can name this package without importing torch.
"""
