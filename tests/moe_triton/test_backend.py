"""The backend in Triton's interpreter: the contract, with every kind of launch."""

from collections.abc import Sequence
from typing import ClassVar

import pytest
import torch

pytest.importorskip("triton")

from minisgl.moe import MoeBackend, MoeContext
from minisgl.testing.moe_contract import MoeBackendContract, Sizes
from minisgl_moe_triton.backend import TritonMoeBackend
from minisgl_moe_triton.configs import Columns, Few, Grouped, Launch, Tile
from support.moe_products import check_products

if torch.cuda.is_available():
    pytest.skip("tests/gpu/test_moe.py runs this on a card", allow_module_level=True)

TRUNCATED = 4e-2
"""The interpreter cuts float32 off where a card rounds it to bfloat16."""


def tile(
    *, swapped: bool, outputs: int = 32, inputs: int = 32, group: int = 2, tma: bool = False
) -> Tile:
    return Tile(
        outputs=outputs, inputs=inputs, group=group, stages=2, warps=4, swapped=swapped, tma=tma
    )


class InInterpreter(MoeBackendContract):
    sizes: ClassVar[Sequence[Sizes]] = (Sizes(8, 2, 64, 32), Sizes(5, 3, 72, 40))
    num_tokens = (1, 41)
    launches: ClassVar[tuple[Launch, ...]]

    def create(self, context: MoeContext) -> MoeBackend:
        return TritonMoeBackend(context, self.launches)


class TestFewTokens(InInterpreter):
    dtype = torch.bfloat16
    tolerance = TRUNCATED
    launches = (
        Few(
            tokens=1, gate_up=Columns(outputs=16, inputs=64, warps=4),
            down=Columns(outputs=32, inputs=64, warps=4),
        ),
    )  # fmt: skip
    num_tokens = (1, 5)


class TestSwapped(InInterpreter):
    dtype = torch.bfloat16
    tolerance = TRUNCATED
    launches = (
        Grouped(
            tokens=1, rows=16, gate_up=tile(swapped=True, group=1),
            down=tile(swapped=True, outputs=64),
        ),
    )  # fmt: skip


class TestStraight(InInterpreter):
    dtype = torch.float16
    launches = (
        Grouped(
            tokens=1, rows=32, gate_up=tile(swapped=False, inputs=64),
            down=tile(swapped=False, group=3),
        ),
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:invalid value")
class TestCopied(InInterpreter):
    """Weights and rows by descriptors, in both orders; sizes that they do not take by pointers.

    A tile may hold rows of the next expert, or of none, which are computed and not stored.
    """

    dtype = torch.float16
    sizes = (Sizes(8, 2, 64, 32), Sizes(5, 3, 72, 40), Sizes(4, 2, 36, 20))
    launches = (
        Grouped(
            tokens=1, rows=16, gate_up=tile(swapped=True, tma=True),
            down=tile(swapped=False, outputs=64, tma=True),
        ),
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:(invalid value|overflow|All-NaN)")
class Fp8InInterpreter(InInterpreter):
    """Rounded to float16, which the interpreter does as a card: errors are those of the kernels.

    Rows of experts that are not held are quantized as they lie in memory, and stay unused.
    """

    dtype = torch.float16
    tolerance = 3e-3
    weights_dtype = torch.float8_e4m3fn


class TestFewTokensInFp8(Fp8InInterpreter):
    """Rows of more inputs than a program holds at once are among them."""

    launches = (
        Few(
            tokens=1, gate_up=Columns(outputs=16, inputs=32, warps=4),
            down=Columns(outputs=32, inputs=64, warps=4),
        ),
    )  # fmt: skip
    num_tokens = (1, 5)


class TestSwappedInFp8(Fp8InInterpreter):
    launches = (
        Grouped(
            tokens=1, rows=16, gate_up=tile(swapped=True, group=1),
            down=tile(swapped=True, outputs=64),
        ),
    )  # fmt: skip


class TestStraightInFp8(Fp8InInterpreter):
    launches = (
        Grouped(
            tokens=1, rows=32, gate_up=tile(swapped=False, inputs=64),
            down=tile(swapped=False, group=3),
        ),
    )  # fmt: skip


class TestCopiedInFp8(Fp8InInterpreter):
    """Both orders; sizes that descriptors do not take by pointers."""

    sizes = (Sizes(8, 2, 64, 32), Sizes(5, 3, 72, 40))
    launches = (
        Grouped(
            tokens=1, rows=16, gate_up=tile(swapped=True, tma=True),
            down=tile(swapped=False, outputs=64, tma=True),
        ),
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:(invalid value|overflow|All-NaN)")
@pytest.mark.parametrize("swapped", [True, False])
def test_products_in_fp8_are_those_of_the_quantized_values(swapped: bool) -> None:
    launch = Grouped(
        tokens=1, rows=16, gate_up=tile(swapped=swapped), down=tile(swapped=not swapped)
    )
    check_products("cpu", torch.float16, Sizes(5, 3, 72, 40), 23, launch, 2e-3)
