"""What is special about the tiny model's server that several files share."""

TINY_PAGES = 200
"""Of its KV pool, 8 tokens each."""
SECOND_EOS = 77
"""A second token that ends its answers."""
