"""Routed experts for minisgl on NVIDIA GPUs, in Triton."""
