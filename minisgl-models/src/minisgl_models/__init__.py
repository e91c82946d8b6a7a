"""Model architectures for minisgl: dense and sparse ones of Llama, Mistral, Qwen and OLMo."""
