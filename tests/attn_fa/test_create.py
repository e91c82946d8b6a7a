"""Choosing a version, importing it, and what it is asked to compile before the backend is made."""

import os
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from minisgl.errors import UnsupportedBackendError
from minisgl.testing.paged_rows import PagedRows
from minisgl_attn_fa import create
from minisgl_attn_fa.fa4 import FlashAttention4
from minisgl_attn_fa.installed import RELEASES
from minisgl_attn_fa.kernels import FlashAttention2, FlashAttention3
from minisgl_attn_fa.samples import largest_error, samples
from minisgl_attn_fa.settings import FaSettings
from support import fake_flash_attn as fakes
from support.kernel_site import query


def test_auto_takes_the_newest_that_can_run(flash_attn_site):
    auto = FaSettings()
    flash_attn_site.fa2()
    assert create.choose_version(auto, query(page_size=256)) == "fa2"
    flash_attn_site.fa3()
    assert create.choose_version(auto, query(page_size=256)) == "fa3"
    flash_attn_site.fa4()
    assert create.choose_version(auto, query(page_size=256)) == "fa4"
    assert create.choose_version(auto, query(logit_soft_cap=True)) == "fa3"
    old = query(page_size=256, compute_capability=(8, 0))
    assert create.choose_version(auto, old) == "fa2"


def test_auto_without_any_says_why_of_each(flash_attn_site):
    with pytest.raises(UnsupportedBackendError) as error:
        create.choose_version(FaSettings(), query())
    text = str(error.value)
    assert text.startswith("backend 'fa' cannot run here: FlashAttention 4 needs flash-attn-4")
    assert "FlashAttention 2 takes pages of multiples of 256 tokens, found 16" in text


def test_a_version_that_is_forced_runs_or_says_why_not_and_what_else(flash_attn_site):
    flash_attn_site.fa2()
    flash_attn_site.fa4()
    assert create.choose_version(FaSettings(version="2"), query(page_size=256)) == "fa2"
    with pytest.raises(UnsupportedBackendError) as error:
        create.choose_version(FaSettings(version=2), query())
    assert str(error.value) == (
        "backend_options.fa.version='fa2' cannot run here: FlashAttention 2 takes pages of "
        "multiples of 256 tokens, found 16. Set it to auto or fa4."
    )
    with pytest.raises(UnsupportedBackendError, match="as no other can run"):
        create.choose_version(FaSettings(version=4), query(compute_capability=(8, 0)))


def modules(monkeypatch, **contents) -> None:
    """Put modules with these functions where ``create`` imports them from."""
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, functions in contents.items():
        module = ModuleType(name)
        for function, value in functions.items():
            setattr(module, function, value)
        where = {
            "fa4": "flash_attn.cute.interface",
            "fa3": "flash_attn_interface",
            "fa2": "flash_attn.flash_attn_interface",
        }[name]
        monkeypatch.setitem(sys.modules, where, module)
        if name == "fa2":
            sys.modules["flash_attn"].flash_attn_interface = module
        if name == "fa4":
            sys.modules["flash_attn.cute"].interface = module


def test_each_version_is_imported_from_its_own_module(monkeypatch):
    modules(
        monkeypatch,
        fa4={"flash_attn_varlen_func": fakes.fa4_varlen},
        fa3={"flash_attn_with_kvcache": fakes.fa3_with_kvcache},
        fa2={
            "flash_attn_with_kvcache": fakes.fa2_with_kvcache,
            "flash_attn_varlen_func": fakes.fa2_varlen,
        },
    )
    kinds = {"fa4": FlashAttention4, "fa3": FlashAttention3, "fa2": FlashAttention2}
    assert {name: type(create.load(name, (9, 0))) for name in RELEASES} == kinds


ENABLED, FOLDER = (f"FLASH_ATTENTION_CUTE_DSL_CACHE_{name}" for name in ("ENABLED", "DIR"))


def test_what_version_4_compiles_is_kept_for_the_next_start(monkeypatch, tmp_path):
    modules(monkeypatch, fa4={"flash_attn_varlen_func": fakes.fa4_varlen})
    create.load("fa4", (9, 0))
    folder = tmp_path / "minisgl" / "kernels" / "flash-attention-4"
    assert (os.environ[ENABLED], os.environ[FOLDER]) == ("1", str(folder))
    assert folder.stat().st_mode & 0o777 == 0o700, "nobody else leaves code there"


def test_whoever_says_where_or_whether_it_is_kept_is_obeyed(monkeypatch, tmp_path):
    modules(monkeypatch, fa4={"flash_attn_varlen_func": fakes.fa4_varlen})
    monkeypatch.setenv(ENABLED, "0")
    monkeypatch.setenv(FOLDER, "/elsewhere")
    create.load("fa4", (9, 0))
    assert (os.environ[ENABLED], os.environ[FOLDER]) == ("0", "/elsewhere")
    assert not (tmp_path / "minisgl").exists()


def test_a_folder_that_cannot_be_made_is_a_warning(monkeypatch, tmp_path, caplog):
    modules(monkeypatch, fa4={"flash_attn_varlen_func": fakes.fa4_varlen})
    (tmp_path / "minisgl").write_text("a file")
    create.load("fa4", (9, 0))
    assert os.environ[ENABLED] == "0", "not in the folder for temporary files"
    assert "compiles at every start" in caplog.text


def test_a_function_of_another_version_is_refused(flash_attn_site, monkeypatch):
    flash_attn_site.fa4()
    modules(monkeypatch, fa4={"flash_attn_varlen_func": fakes.fa2_varlen})
    with pytest.raises(UnsupportedBackendError) as error:
        create.load("fa4", (9, 0))
    text = str(error.value)
    assert "FlashAttention 4 4.0.0b36: " in text
    assert "takes no seqused_k and no page_table, so it belongs to another version" in text
    assert "install flash-attn-4 again, after the others" in text


def context(**changed):
    rows = PagedRows([40], page_size=16, num_q_heads=4, num_kv_heads=2, head_dim=8)
    return replace(rows.context, **changed)


def warm_up(kernel, context) -> None:
    for sample in samples(context):
        create.prepare(kernel, sample)


@pytest.mark.parametrize(
    ("changed", "windows"),
    [({}, {(None, None)}), ({"sliding_window": True}, {(None, None), (15, 0)})],
)
def test_version_4_meets_every_kind_of_launch_before_it_serves(changed, windows):
    noted = fakes.Noted(fakes.fa4_varlen)
    warm_up(FlashAttention4(noted), context(max_running_requests=300, **changed))
    kinds = {
        (call["cu_seqlens_q"] is None, call["window_size"], len(call["seqused_k"]) > 256)
        for call in noted.calls
    }
    expected = {
        (decode, window, many)
        for window in windows
        for decode, many in ((True, False), (False, False), (False, True))
    }
    assert kinds == expected


def test_rows_that_never_come_are_not_compiled_for():
    noted = fakes.Noted(fakes.fa4_varlen)
    warm_up(FlashAttention4(noted), context(max_running_requests=256))
    assert max(len(call["seqused_k"]) for call in noted.calls) == 2


@pytest.mark.parametrize(
    ("head_dim", "masked"), [(64, False), (80, True), (96, True), (128, False)]
)
def test_decode_rows_of_some_head_dims_are_masked(head_dim, masked):
    """Version 4 has wrong tiles for them without a mask; one query sees all keys either way."""
    noted = fakes.Noted(fakes.fa4_varlen)
    rows = PagedRows([40], page_size=16, num_q_heads=4, num_kv_heads=2, head_dim=head_dim)
    warm_up(FlashAttention4(noted), rows.context)
    decode = [call["causal"] for call in noted.calls if call["cu_seqlens_q"] is None]
    assert decode == [masked]


@pytest.mark.parametrize("name", ["fa3", "fa2"])
def test_other_versions_run_once_before_they_serve(name):
    rows = PagedRows([40], page_size=256, num_q_heads=4, num_kv_heads=2, head_dim=8)
    if name == "fa3":
        noted = fakes.Noted(fakes.fa3_with_kvcache)
        warm_up(FlashAttention3(noted), rows.context)
    else:
        noted = fakes.Noted(fakes.fa2_varlen)
        warm_up(FlashAttention2(fakes.fa2_with_kvcache, noted), rows.context)
    assert noted.calls


# -- version 4's kernels, called directly


def learned(interface: fakes.FakeInterface, **changed) -> FlashAttention4:
    kernel = FlashAttention4(interface.flash_attn_varlen_func, interface)
    warm_up(kernel, context(**changed))
    return kernel


def test_what_was_learned_is_called_without_its_function_and_compiles_nothing():
    interface = fakes.FakeInterface()
    kernel = learned(interface, sliding_window=True, max_running_requests=300)
    compiled, public, before = [*interface.compiled], interface.public_calls, interface.kernel_calls
    assert len(compiled) == len(set(compiled)) == 4
    few = [*samples(context(sliding_window=True))]
    for sample in few:
        kernel.attend(sample.q, sample.k, sample.v, sample.launch, sample.layer)
    assert interface.public_calls == public
    assert interface.kernel_calls == before + len(few) == before + 6
    assert interface.compiled == compiled


def test_many_rows_go_in_pieces_which_compiles_nothing_for_them():
    interface = fakes.FakeInterface()
    kernel = learned(interface, max_running_requests=300)
    assert len(interface.compiled) == 2
    before = interface.kernel_calls
    many = [*samples(context(max_running_requests=300))][-1]
    assert len(many.launch.kv_lens) == 257
    assert largest_error(kernel, many) < 1e-6
    assert interface.kernel_calls == before + 2


def test_many_rows_are_compiled_for_where_kernels_cannot_be_called_directly():
    interface = fakes.FakeInterface(fault=1e-3)
    kernel = learned(interface, max_running_requests=300)
    compiled = [*interface.compiled]
    assert len(compiled) == 3
    for sample in samples(context(max_running_requests=300)):
        assert largest_error(kernel, sample) < 1e-6
    assert interface.compiled == compiled


def test_a_kernel_that_gives_something_else_is_not_used_and_that_is_said(caplog):
    interface = fakes.FakeInterface(fault=1e-3)
    kernel = learned(interface)
    assert "called through its own function for decode" in caplog.text
    assert "called through its own function for prefill" in caplog.text
    public = interface.public_calls
    for sample in samples(context()):
        kernel.attend(sample.q, sample.k, sample.v, sample.launch, sample.layer)
    assert interface.public_calls == public + 3


@pytest.mark.parametrize(
    ("version", "capability", "learns"),
    [("4.0.0b36", (9, 0), True), ("4.0.0b37", (9, 0), False), ("4.0.0b36", (10, 0), False)],
)
def test_only_versions_and_devices_that_were_looked_up_are_called_directly(
    flash_attn_site, monkeypatch, version, capability, learns
):
    flash_attn_site.fa4(version)
    interface = fakes.FakeInterface()
    modules(monkeypatch)
    sys.modules["flash_attn.cute"].interface = interface
    kernel = create.load("fa4", capability)
    warm_up(kernel, context())
    public = interface.public_calls
    for sample in samples(context()):
        kernel.attend(sample.q, sample.k, sample.v, sample.launch, sample.layer)
    assert (interface.public_calls == public) is learns


@pytest.mark.parametrize("offset", [0, 2])
def test_queries_of_any_stride_and_address_reach_the_kernel_aligned(offset):
    interface = fakes.FakeInterface()
    kernel = learned(interface)
    sample = next(samples(context()))
    wide = torch.randn(2, 11, 8 + offset)
    q = wide[:, 3:7, offset:]
    public = kernel._public(q.contiguous(), (sample.k, sample.v), sample.launch, sample.layer)
    out = kernel.attend(q, sample.k, sample.v, sample.launch, sample.layer)
    torch.testing.assert_close(out, public)
