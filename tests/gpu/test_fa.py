"""The backend ``fa`` on a card: the contract with every version that is installed."""

import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar
from unittest import mock

import pytest
import torch

from minisgl.attention.interface import AttentionBackend, AttentionContext
from minisgl.attention.torch_backend import TorchAttentionBackend
from minisgl.plugins import BackendQuery
from minisgl.testing.attention_contract import LENGTHS, AttentionBackendContract
from minisgl.testing.paged_rows import PagedRows, largest_error
from minisgl_attn_fa import create
from minisgl_attn_fa.edges import why_not
from minisgl_attn_fa.fa4 import DIRECT, DirectKernels, FlashAttention4
from minisgl_attn_fa.installed import RELEASES, VersionName, installed_version, why_unusable
from minisgl_attn_fa.settings import FaSettings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    # FlashAttention and what it imports warn about themselves.
    pytest.mark.filterwarnings("default"),
]


def skip_without(version: VersionName, page_size: int = 256) -> None:
    """Skip, with the reason, what this device or what is installed cannot run."""
    query = BackendQuery(
        device="cuda",
        compute_capability=torch.cuda.get_device_capability(),
        dtype="bfloat16",
        kv_dtype="bfloat16",
        page_size=page_size,
        num_q_heads=16,
        num_kv_heads=8,
        head_dim=128,
    )
    reason = why_not(version, query)
    if reason is not None:
        pytest.skip(f"{RELEASES[version].title} {reason}")


class Fa(AttentionBackendContract):
    version: ClassVar[VersionName]
    device = "cuda"
    dtype = torch.bfloat16
    num_kv_heads = 8
    mixed_batches = True
    graph_sizes: ClassVar[Sequence[int]] = (1, 2, 5, 16, 33, 64, 200)

    def create(self, context: AttentionContext) -> AttentionBackend:
        skip_without(self.version, context.page_size)
        return create.create_backend(context, FaSettings(version=self.version))


class Version4(Fa):
    version = "fa4"
    page_sizes = (1, 16, 64)


class TestVersion4HeadDim64(Version4):
    head_dims = (64,)


class TestVersion4HeadDim128(Version4):
    head_dims = (128,)


class Version4PagesByTma(Fa):
    """It loads whole pages then, and multiplies what follows a row's last token with 0."""

    version = "fa4"
    page_sizes = (128,)
    usual_page_size = 128
    tail = 3e4


class TestVersion4PagesByTmaHeadDim64(Version4PagesByTma):
    head_dims = (64,)


class TestVersion4PagesByTmaHeadDim128(Version4PagesByTma):
    head_dims = (128,)


class TestVersion4OtherHeadDims(Fa):
    version = "fa4"
    page_sizes = (16, 256)
    groups = (2,)
    head_dims = (80, 96, 192, 256)


class TestVersion4Float16(Fa):
    version = "fa4"
    dtype = torch.float16
    page_sizes = (16,)
    groups = (4,)


class TestVersion4OneKVHead(Fa):
    version = "fa4"
    page_sizes = (16,)
    groups = (8,)
    num_kv_heads = 1


class TestVersion4ManyRows(Fa):
    """More rows than it looks up one by one."""

    version = "fa4"
    page_sizes = (16,)
    groups = (2,)
    head_dims = (128,)
    graph_sizes = (1, 300)


class TestVersion4ThroughItsFunction(Fa):
    """As versions run whose kernels' arguments were not looked up."""

    version = "fa4"
    page_sizes = (16,)
    groups = (2,)
    head_dims = (128,)

    def create(self, context: AttentionContext) -> AttentionBackend:
        with mock.patch.object(create, "DIRECT", frozenset[str]()):
            return super().create(context)


class TestVersion3(Fa):
    version = "fa3"
    page_sizes = (1, 16, 64)


class TestVersion3LargePages(Fa):
    version = "fa3"
    page_sizes = (128, 256)
    usual_page_size = 128
    tail = 3e4


class TestVersion2(Fa):
    version = "fa2"
    page_sizes = (256,)
    usual_page_size = 256


def make(
    version: VersionName, page_size: int = 16, **changed
) -> tuple[PagedRows, AttentionBackend]:
    rows = PagedRows(
        LENGTHS,
        page_size=page_size,
        num_q_heads=16,
        num_kv_heads=8,
        head_dim=128,
        max_rows=300,
        dtype=torch.bfloat16,
        device="cuda",
        tail=3e4,
    )
    context = replace(rows.context, **changed)
    backend = create.create_backend(context, FaSettings(version=version))
    rows.allocate()
    return rows, backend


@pytest.mark.parametrize(
    ("version", "page_size"), [("fa4", 16), ("fa4", 128), ("fa3", 16), ("fa2", 256)]
)
@pytest.mark.parametrize(("window", "cap"), [(1, None), (7, None), (100, None), (None, 2.0)])
def test_windows_and_caps_are_those_of_the_reference(version, page_size, window, cap):
    skip_without(version, page_size)
    if version == "fa4" and cap is not None:
        pytest.skip("version 4 refuses caps")
    rows, backend = make(version, page_size, sliding_window=window is not None)
    reference = TorchAttentionBackend(rows.context)
    layer = replace(rows.layers[0], sliding_window=window, logit_soft_cap=cap)
    for order, seen, chunks in (
        ([11, 3, 6], [777, 16, 40], None),
        ([9, 11, 0], [129, 700, 1], [100, 33, 1]),
    ):
        q = rows.queries(sum(chunks or [1] * len(order)))
        batch = rows.batch(order, seen, chunks)
        with torch.inference_mode():
            expected = reference.attend(q, layer, reference.plan(batch, 0))
            out = backend.attend(q, layer, backend.plan(batch, 0))
        error, token = largest_error(out, expected.double())
        assert error < 2e-2, f"{error:.2e} at token {token}"


FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"


@pytest.mark.parametrize("page_size", [16, 128])
def test_nothing_is_compiled_after_the_backend_was_made(page_size, monkeypatch, tmp_path):
    skip_without("fa4", page_size)
    monkeypatch.setenv(FOLDER, str(tmp_path))  # nothing has been kept there
    import cutlass.cute

    rows, backend = make("fa4", page_size, sliding_window=True)

    def refuse(*_arguments, **_named):
        raise AssertionError("compiled behind an open port")

    monkeypatch.setattr(cutlass.cute, "compile", refuse)
    layers = [rows.layers[0], replace(rows.layers[0], sliding_window=100)]
    many = [row % len(LENGTHS) for row in range(300)]
    launches = [
        ([11], [777], None),
        (many, [LENGTHS[row] for row in many], None),
        ([0], [1], [1]),
        ([11, 10], [777, 300], [777, 3]),
        (many, [LENGTHS[row] for row in many], [1] * 300),
    ]
    with torch.inference_mode():
        for order, seen, chunks in launches:
            q = rows.queries(sum(chunks or [1] * len(order)))
            for layer in layers:
                backend.attend(q, layer, backend.plan(rows.batch(order, seen, chunks), 0))
    torch.cuda.synchronize()


def skip_without_direct_calls() -> None:
    skip_without("fa4")
    if str(installed_version("fa4")) not in DIRECT or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("another version or device")


def test_kernels_are_called_directly_in_the_version_that_was_looked_up(
    caplog, monkeypatch, tmp_path
):
    skip_without_direct_calls()
    monkeypatch.setenv(FOLDER, str(tmp_path))
    with caplog.at_level(logging.INFO):
        _, backend = make("fa4", 128, sliding_window=True)
        assert len(backend._kernel._learned) == 4
        _, backend = make("fa4", 128, sliding_window=True)
        assert isinstance(backend._kernel, DirectKernels)
    assert "kept kernels loaded and compared" in caplog.text
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


START = """
import sys
import torch
from gpu.test_fa import make, outputs
rows, backend = make("fa4", int(sys.argv[1]), sliding_window=True)
torch.save(outputs(rows, backend), sys.argv[2])
print("imported" if "flash_attn" in sys.modules or "cutlass" in sys.modules else "kept")
"""


def outputs(rows: PagedRows, backend: AttentionBackend) -> list[torch.Tensor]:
    """Return what decode rows and prompts of few and many rows give, with a window and without."""
    many = [row % len(LENGTHS) for row in range(300)]
    seen = [LENGTHS[row] for row in many]
    launches = [
        (many, seen, None),
        ([11, 10], [777, 300], [777, 3]),
        (many, seen, [1 + row % 2 if seen[row] > 1 else 1 for row in range(300)]),
    ]
    found = []
    rows._generator.manual_seed(1)
    with torch.inference_mode():
        for order, lengths, chunks in launches:
            q = rows.queries(sum(chunks or [1] * len(order)))
            for window in (None, 100):
                layer = replace(rows.layers[0], sliding_window=window)
                plan = backend.plan(rows.batch(order, lengths, chunks), 0)
                found.append(backend.attend(q, layer, plan).cpu())
    return found


@pytest.mark.parametrize("page_size", [16, 128])
def test_a_second_process_uses_the_kept_kernels_and_gets_the_same(page_size, tmp_path):
    skip_without_direct_calls()
    environment = {**os.environ, FOLDER: str(tmp_path / "kept")}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    said = []
    for number in range(2):
        arguments = [str(page_size), str(tmp_path / f"{number}.pt")]
        done = subprocess.run(
            [sys.executable, "-c", START, *arguments],
            capture_output=True, text=True, env=environment, check=False, timeout=280,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.split()[-1])
    assert said == ["imported", "kept"]
    first, second = (torch.load(tmp_path / f"{number}.pt") for number in range(2))
    assert len(first) == 6
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_many_rows_in_pieces_are_as_through_its_function(monkeypatch, tmp_path):
    skip_without_direct_calls()
    monkeypatch.setenv(FOLDER, str(tmp_path))
    rows, backend = make("fa4", sliding_window=True)
    with mock.patch.object(create, "DIRECT", frozenset[str]()):
        context = replace(rows.context, sliding_window=True)
        other = create.create_backend(context, FaSettings(version="fa4"))
    assert isinstance(other._kernel, FlashAttention4)
    assert not other._kernel._learned
    found, expected = outputs(rows, backend), outputs(rows, other)
    for one, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(one, exact, rtol=1e-2, atol=1e-3)


def test_it_says_which_version_it_runs(caplog):
    if why_unusable("fa4") is not None:
        pytest.skip(str(why_unusable("fa4")))
    with caplog.at_level(logging.INFO):
        make("fa4")
    assert "FlashAttention 4" in caplog.text
