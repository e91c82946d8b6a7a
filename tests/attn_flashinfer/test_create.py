"""Creation, on stand-ins for FlashInfer and the device: what is loaded, when it is compiled."""

import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from minisgl.errors import UnsupportedBackendError
from minisgl.testing.paged_rows import PagedRows
from minisgl_attn_flashinfer import create, installed
from minisgl_attn_flashinfer.create import create_backend
from minisgl_attn_flashinfer.settings import FlashInferSettings
from support.fake_flashinfer import FakeEvent, FakeStream, RecordedModule
from support.flashinfer_site import MODULES

COMMON = (*(torch.bfloat16,) * 3, torch.int32, 128, 128, 0, False, False)


@pytest.fixture
def loaded(monkeypatch) -> list[tuple]:
    """Arguments with which modules were asked for, in order; every module is compiled."""
    asked: list[tuple] = []

    def module(template, arguments):
        asked.append((template, *arguments))
        return RecordedModule(template)

    for name, attribute, load in (
        ("flashinfer", "unused", None),
        ("flashinfer.prefill", "get_batch_prefill_module", lambda t, *a: module(t, a)),
        ("flashinfer.decode", "get_batch_decode_module", lambda *a: module("decode", a)),
    ):
        stand_in = ModuleType(name)
        setattr(stand_in, attribute, load)
        monkeypatch.setitem(sys.modules, name, stand_in)
    monkeypatch.setattr(installed, "why_unusable", lambda: None)
    monkeypatch.setattr(installed, "flashinfer_version", lambda: "0.6.12")
    monkeypatch.setattr(installed, "precompiled", lambda name: name in MODULES.values())
    monkeypatch.setattr(installed, "why_not_compilable", lambda: "no nvcc")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(create, "_DeviceEvent", lambda device: FakeEvent(FakeStream()))
    return asked


def context(group: int = 2, head_dim: int = 128):
    return PagedRows(
        [64],
        page_size=16,
        num_q_heads=8 * group,
        num_kv_heads=8,
        head_dim=head_dim,
        dtype=torch.bfloat16,
    ).context


def test_every_kernel_is_loaded_at_creation_with_flashinfer_s_own_arguments(loaded, caplog):
    with caplog.at_level(logging.INFO):
        backend = create_backend(context(), FlashInferSettings())
    assert loaded == [
        ("fa3", *COMMON, False),
        ("fa2", *COMMON, False),
        ("decode", *COMMON),
    ]
    assert backend.cuda_graphs is not None
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == (
        "FlashInfer 0.6.12: prefill fa3, decode on tensor cores and cuda cores, workspace 5 MiB"
    )


@pytest.mark.parametrize(
    ("settings", "group", "expected"),
    [
        ({"decode_kernel": "tensor"}, 2, ["fa3", "fa2"]),
        ({"decode_kernel": "cuda"}, 2, ["fa3", "decode"]),
        ({"prefill_template": "fa2", "decode_kernel": "cuda"}, 2, ["fa2", "decode"]),
        ({}, 5, ["fa3", "fa2"]),
    ],
)
def test_only_what_is_used_is_loaded(loaded, settings, group, expected):
    create_backend(context(group), FlashInferSettings(**settings))
    assert [template for template, *_ in loaded] == expected


def test_what_must_be_compiled_is_compiled_at_creation_and_logged(loaded, monkeypatch, caplog):
    monkeypatch.setattr(installed, "why_not_compilable", lambda: None)
    monkeypatch.setattr(installed, "precompiled", lambda name: False)
    with caplog.at_level(logging.INFO):
        create_backend(context(), FlashInferSettings(decode_kernel="tensor"))
    lines = [record.getMessage() for record in caplog.records]
    for key in ("fa3", "fa2"):
        assert any(f"compiles {MODULES[key]}" in line for line in lines)
        assert any(f"{MODULES[key]} is loaded after" in line for line in lines)


def test_a_workspace_that_is_asked_for(loaded):
    backend = create_backend(context(), FlashInferSettings(workspace_mib=3))
    assert backend._floats.numel() == 3 * 2**20


@pytest.mark.parametrize(("pdl", "capability"), [(True, (9, 0)), (False, (9, 0)), (True, (8, 0))])
def test_dependent_launch_where_it_is_wanted_and_there(loaded, monkeypatch, pdl, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    backend = create_backend(context(), FlashInferSettings(pdl=pdl))
    kernels = [backend._kernels.prefill, *backend._kernels.decode.values()]
    assert {kernel._pdl for kernel in kernels} == {pdl and capability == (9, 0)}


def test_creation_says_why_it_cannot(loaded, monkeypatch):
    with pytest.raises(UnsupportedBackendError, match=r"prefill_template='fa2': .*no nvcc"):
        create_backend(context(head_dim=64), FlashInferSettings(prefill_template="fa2"))
    monkeypatch.setattr(installed, "why_unusable", lambda: "is not there")
    with pytest.raises(UnsupportedBackendError, match="backend 'flashinfer' is not there"):
        create_backend(context(), FlashInferSettings())
