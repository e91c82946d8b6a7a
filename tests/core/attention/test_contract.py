"""Core's own reference backend keeps the contract that plugins are held to."""

import torch

from minisgl.attention.interface import AttentionBackend, AttentionContext
from minisgl.attention.torch_backend import TorchAttentionBackend
from minisgl.testing.attention_contract import AttentionBackendContract


class Reference(AttentionBackendContract):
    head_dims = (64,)
    mixed_batches = True
    num_launches = 30
    synchronizes = True

    def create(self, context: AttentionContext) -> AttentionBackend:
        return TorchAttentionBackend(context)


class TestTorchBackend(Reference):
    page_sizes = (1, 16)
    groups = (1, 5)


class TestTorchBackendInBfloat16(Reference):
    dtype = torch.bfloat16
    page_sizes = (16,)
    groups = (2,)
