"""The reference MoE backend keeps the contract that it sets for others."""

import torch

from minisgl.moe.interface import MoeBackend, MoeContext
from minisgl.moe.torch_backend import TorchMoeBackend
from minisgl.testing.moe_contract import MoeBackendContract


class TestFloat32(MoeBackendContract):
    def create(self, context: MoeContext) -> MoeBackend:
        return TorchMoeBackend(context)


class TestFp8(MoeBackendContract):
    weights_dtype = torch.float8_e4m3fn

    def create(self, context: MoeContext) -> MoeBackend:
        return TorchMoeBackend(context)


class TestFp8InBfloat16(TestFp8):
    dtype = torch.bfloat16


class TestBfloat16(MoeBackendContract):
    dtype = torch.bfloat16

    def create(self, context: MoeContext) -> MoeBackend:
        return TorchMoeBackend(context)
