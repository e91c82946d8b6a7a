"""Any causal language model of Hugging Face transformers, with our cache and attention behind it.

The modelling code is transformers' own and runs eagerly; what it calls for attention is
transformers' attention interface, which leads to the attention backend and the KV pool. Only
transformers' code runs, never a checkpoint's.
"""
