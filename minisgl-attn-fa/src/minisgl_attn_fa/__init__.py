"""Attention for minisgl on NVIDIA GPUs, through FlashAttention 4, 3 or 2."""
