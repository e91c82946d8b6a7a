"""Model architectures for minisgl: Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE."""
