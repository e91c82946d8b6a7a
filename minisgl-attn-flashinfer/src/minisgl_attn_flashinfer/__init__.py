"""Attention for minisgl on NVIDIA GPUs, through FlashInfer's paged kernels."""
