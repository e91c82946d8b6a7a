"""Which kernel serves what, by rows, group, device, settings and what is to be had."""

import logging

import pytest

from minisgl.errors import UnsupportedBackendError
from minisgl_attn_flashinfer import choice, installed
from minisgl_attn_flashinfer.choice import DecodeKernel, choose_decode_kernel
from minisgl_attn_flashinfer.create import choose_decode_kernels, choose_prefill_template
from minisgl_attn_flashinfer.settings import FlashInferSettings
from minisgl_attn_flashinfer.sizes import Shape
from support.flashinfer_site import MODULES

BOTH: frozenset[DecodeKernel] = frozenset({"tensor", "cuda"})


@pytest.mark.parametrize(
    ("rows", "group", "expected"),
    [
        # The measured cases of the table.
        (1, 2, "cuda"),
        (64, 2, "tensor"),
        (256, 2, "tensor"),
        (64, 8, "tensor"),
        # The rest of the rule.
        (4, 3, "cuda"),
        (5, 3, "tensor"),
        (1, 4, "tensor"),
        (256, 1, "cuda"),
    ],
)
def test_rows_and_group_decide(rows, group, expected):
    assert choose_decode_kernel(rows, group, BOTH) == expected


def test_the_only_kernel_is_taken_whatever_the_rule_says():
    assert choose_decode_kernel(1, 2, frozenset({"tensor"})) == "tensor"
    assert choose_decode_kernel(256, 8, frozenset({"cuda"})) == "cuda"
    assert choose_decode_kernel(256, 5, frozenset({"tensor"})) == "tensor"


def test_the_table_is_documented():
    assert "| 256 of 450 to 1350         | 16/8       | 2     | 221          | 252" in str(
        choice.__doc__
    )


@pytest.fixture
def lacking(monkeypatch) -> set[str]:
    """Keys of the modules that are neither compiled nor can be."""
    keys: set[str] = set()
    monkeypatch.setattr(
        installed,
        "why_missing",
        lambda module: "no nvcc" if module in {MODULES[key] for key in keys} else None,
    )
    monkeypatch.setattr(installed, "flashinfer_version", lambda: "0.6.12")
    return keys


def template(asked: str = "auto", capability: tuple[int, int] = (9, 0)) -> str | None:
    settings = FlashInferSettings(prefill_template=asked)
    return choose_prefill_template(settings, capability, "bfloat16", 128)


def kernels(asked: str = "auto", group: int = 2) -> tuple[str, ...]:
    shape = Shape(num_q_heads=8 * group, num_kv_heads=8, head_dim=128, page_size=16, num_sms=132)
    settings = FlashInferSettings(decode_kernel=asked)
    return choose_decode_kernels(settings, "bfloat16", shape)


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((8, 0), "fa2"), ((8, 9), "fa2"), ((9, 0), "fa3"), ((10, 0), "fa2"), ((12, 0), "fa2")],
)
@pytest.mark.usefixtures("lacking")
def test_the_device_decides_on_the_template(capability, expected):
    assert template(capability=capability) == expected


def test_a_template_that_is_not_to_be_had_is_done_without_and_named(lacking, caplog):
    lacking.add("fa3")
    with caplog.at_level(logging.WARNING):
        assert template() == "fa2"
    (record,) = caplog.records
    assert "prefill without the fa3 template: FlashInfer 0.6.12 has no compiled" in record.message
    lacking.add("fa2")
    assert template() is None


def test_a_template_that_is_asked_for_is_had_or_refused(lacking):
    assert template("fa2") == "fa2"
    with pytest.raises(UnsupportedBackendError, match=r"needs compute capability 9.x, found 8.0"):
        template("fa3", (8, 0))
    lacking.add("fa3")
    with pytest.raises(UnsupportedBackendError, match=r"prefill_template='fa3': .*no nvcc"):
        template("fa3")


def test_decode_loads_what_is_to_be_had(lacking):
    assert kernels() == ("tensor", "cuda")
    assert kernels(group=5) == ("tensor",)
    lacking.add("decode")
    assert kernels() == ("tensor",)
    lacking.add("fa2")
    assert kernels() == ()


def test_a_decode_kernel_that_is_asked_for_is_had_or_refused(lacking):
    assert kernels("tensor") == ("tensor",)
    assert kernels("cuda", group=8) == ("cuda",)
    with pytest.raises(UnsupportedBackendError, match=r"takes 1, 2, 3, 4, 8 query heads .*found 5"):
        kernels("cuda", group=5)
    lacking.add("decode")
    with pytest.raises(UnsupportedBackendError, match=r"decode_kernel='cuda': .*no nvcc"):
        kernels("cuda")
