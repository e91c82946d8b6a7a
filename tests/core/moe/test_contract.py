"""The reference MoE backend keeps the contract that it sets for others."""

import torch

from minisgl.moe.interface import MoeBackend, MoeContext
from minisgl.moe.torch_backend import TorchMoeBackend
from minisgl.testing.moe_contract import MoeBackendContract


class TestFloat32(MoeBackendContract):
    def create(self, context: MoeContext) -> MoeBackend:
        return TorchMoeBackend(context)


class TestBfloat16(MoeBackendContract):
    dtype = torch.bfloat16

    def create(self, context: MoeContext) -> MoeBackend:
        return TorchMoeBackend(context)
