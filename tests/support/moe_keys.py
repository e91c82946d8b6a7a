"""What the MoE backend would compile once it serves, found without a card; a script.

Prints as JSON how many kernels the start names, and those that only launches of other numbers of
tokens do, for experts in bfloat16 or, as a second argument says, in float8_e4m3fn. Without Triton's
interpreter, for a card of compute capability 9.0.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from minisgl.moe import ExpertScales, MoeContext
from minisgl_moe_triton.configs import Columns, Few, Grouped, Tile, TunedFile, write_tuned
from minisgl_moe_triton.create import create_backend, key_of
from minisgl_moe_triton.settings import TritonMoeSettings
from support.compiled_keys import note_keys

CONTEXT = MoeContext(
    device=torch.device("cpu"), dtype=torch.bfloat16, num_experts=12, top_k=3, hidden_size=256,
    intermediate_size=128, activation="silu", max_num_tokens=3000,
)  # fmt: skip


def tile(outputs: int, *, tma: bool) -> Tile:
    return Tile(
        outputs=outputs, inputs=64, group=1, stages=2, warps=4, swapped=outputs == 64, tma=tma
    )


def write(context: MoeContext, folder: Path) -> None:
    """Write a launch of each kind for a part of the numbers of tokens."""
    columns = Columns(outputs=4, inputs=256, warps=4)
    launches = (
        Few(tokens=4, gate_up=columns, down=columns),
        Grouped(tokens=64, rows=16, gate_up=tile(64, tma=True), down=tile(64, tma=False)),
        Grouped(tokens=2048, rows=64, gate_up=tile(128, tma=False), down=tile(128, tma=True)),
    )
    write_tuned(key_of(context), TunedFile(launches=launches), folder)


def main(folder: Path, dtype: torch.dtype) -> None:
    named = note_keys()
    quantized = dtype != torch.bfloat16
    context = replace(CONTEXT, weights_dtype=dtype) if quantized else CONTEXT
    write(context, folder)
    backend = create_backend(context, TritonMoeSettings(tuned_folder=folder))
    at_start = set(named)
    gate_up = torch.empty(12, 256, 256, dtype=dtype)
    down = torch.empty(12, 256, 128, dtype=dtype)
    scales = ExpertScales(torch.empty(12, 256), torch.empty(12, 256)) if quantized else None
    for tokens in (1, 2, 3, 16, 64, 65, 128, 500, 1024, 2999):
        for renormalize in (True, False):
            hidden = torch.empty(tokens, 256, dtype=torch.bfloat16)
            logits = torch.empty(tokens, 12, dtype=torch.bfloat16)
            backend.forward(hidden, logits, gate_up, down, renormalize=renormalize, scales=scales)
    sys.stdout.write(json.dumps({"at_start": len(at_start), "later": sorted(named - at_start)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), getattr(torch, sys.argv[2]))
