"""Files of attention measurements, as ``bench kernels --attention`` writes them."""

import json
from pathlib import Path
from typing import Any

from minisgl.benchmark.attention_cases import parse_case
from minisgl.benchmark.attention_cells import Cell, Status


def cell(case: str, backend: str, us: float | None, status: Status = "ok", **changes: Any) -> Any:
    """Return a cell as plain data."""
    reason = "" if status == "ok" else "a reason"
    found = Cell(
        part="grid", case=parse_case(case), backend=backend, status=status, reason=reason, us=us
    )
    return {**found.as_dict(), **changes}


def write_measurements(path: Path, cells: list[Any], **changes: Any) -> Path:
    """Write a file of cells; ``changes`` replace fields of its head."""
    record = {
        "benchmark": "attention",
        "format": 1,
        "command": "minisgl bench kernels --attention",
        "commit": "0123456789abcdef",
        "date": "2026-12-01T10:00:00+00:00",
        "dtype": "bfloat16",
        "device": {"name": "NVIDIA H200"},
        "ceilings": {"read_bytes_per_s": 4.58e12, "flops_per_s": 7.87e14},
        "models": {"Qwen3-0.6B": "16/8x128"},
        "refused": {},
        "seconds": 200.0,
        "cells": cells,
        **changes,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record), encoding="utf-8")
    return path
