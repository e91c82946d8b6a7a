"""The probe says what is missing and how to get it, from a fake installation."""

import pytest

from minisgl.plugins import Supported, Unsupported
from minisgl_attn_flashinfer.measured_ranks import RANKS
from minisgl_attn_flashinfer.probe import probe
from support.flashinfer_site import MODULES
from support.kernel_site import query

ALL = ("fa2", "fa3", "decode")


def reason(**changed) -> str:
    answer = probe(query(**changed))
    assert isinstance(answer, Unsupported), answer
    return answer.reason


def served(**changed) -> tuple[bool, bool]:
    """Return whether it serves prefill and decode; the ranks must be those of the table."""
    asked = query(**changed)
    answer, table = probe(asked), RANKS["flashinfer"]
    assert isinstance(answer, Supported), answer
    assert answer.source == table.source
    shape = (asked.page_size, asked.num_q_heads, asked.num_kv_heads)
    assert answer.prefill_rank in (None, table.prefill_rank(*shape))
    assert answer.decode_rank in (None, table.decode_rank(*shape))
    return answer.prefill_rank is not None, answer.decode_rank is not None


def test_not_installed(monkeypatch):
    monkeypatch.setattr("minisgl_attn_flashinfer.installed.flashinfer_version", lambda: None)
    assert "which is not installed: pip install flashinfer-python" in reason()


@pytest.mark.parametrize("version", ["0.6.11", "0.7.0", "0.7.2.post1", "1.0", "unknown"])
def test_a_version_outside_the_tested_range(flashinfer_site, version):
    flashinfer_site.flashinfer(version, compiled=ALL)
    text = reason()
    assert f"found {version}, which is untested" in text
    assert "pip install 'flashinfer-python<0.7,>=0.6.12'" in text


@pytest.mark.parametrize("version", ["0.6.12", "0.6.18.post1"])
def test_with_compiled_modules(flashinfer_site, version):
    flashinfer_site.flashinfer(version, compiled=ALL)
    assert served() == (True, True)


def test_the_loader_of_modules_is_missing(flashinfer_site, monkeypatch):
    flashinfer_site.flashinfer(compiled=ALL)
    from minisgl_attn_flashinfer import installed

    find = installed.find_spec
    monkeypatch.setattr(
        installed, "find_spec", lambda name: None if name == "tvm_ffi" else find(name)
    )
    assert "needs apache-tvm-ffi, which is not installed" in reason()


def test_nothing_compiled_and_no_compiler_names_module_and_remedies(flashinfer_site):
    flashinfer_site.flashinfer()
    text = reason()
    assert f"has no compiled {MODULES['fa3']}, and cannot compile it: no nvcc at " in text
    assert "Install flashinfer-jit-cache 0.6.12" in text
    assert "or nvcc and ninja" in text


@pytest.mark.parametrize(
    ("nvcc", "ninja", "expected"), [(True, False, "no ninja on PATH"), (False, True, "no nvcc at")]
)
def test_half_a_compiler_is_none(flashinfer_site, nvcc, ninja, expected):
    flashinfer_site.flashinfer()
    flashinfer_site.compiler(nvcc=nvcc, ninja=ninja)
    assert expected in reason()


def test_a_compiler_suffices_unless_flashinfer_is_told_not_to_compile(flashinfer_site, monkeypatch):
    flashinfer_site.flashinfer()
    flashinfer_site.compiler()
    assert served() == (True, True)
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    assert "FLASHINFER_DISABLE_JIT is set" in reason()


@pytest.mark.parametrize(
    ("compiled", "changed", "expected"),
    [
        (("fa2",), {}, (True, True)),
        (("fa3",), {}, (True, False)),
        (("decode",), {}, (False, True)),
        (("fa3", "decode"), {}, (True, True)),
        (("fa3", "decode"), {"num_q_heads": 40}, (True, False)),
        (("fa3", "decode"), {"compute_capability": (8, 0)}, (False, True)),
    ],
)
def test_each_phase_needs_one_of_its_modules(flashinfer_site, compiled, changed, expected):
    flashinfer_site.flashinfer(compiled=compiled)
    assert served(**changed) == expected


def test_modules_of_another_shape_do_not_count(flashinfer_site):
    flashinfer_site.flashinfer(compiled=ALL)
    assert "head_dim_qk_64" in reason(head_dim=64)
    assert "dtype_q_f16" in reason(dtype="float16", kv_dtype="float16")


def test_modules_of_the_companion_package_count_instead_of_flashinfer_s_own(flashinfer_site):
    flashinfer_site.flashinfer(compiled=ALL)
    cache = flashinfer_site.root / "flashinfer_jit_cache" / "jit_cache"
    code = f"def get_jit_cache_dir():\n    return {str(cache)!r}\n"
    flashinfer_site.distribution(
        "flashinfer-jit-cache", "0.6.12+cu130", "flashinfer_jit_cache/__init__.py", code=code
    )
    assert "has no compiled" in reason()
    flashinfer_site.compiled(cache, ALL)
    assert served() == (True, True)


def test_a_companion_of_another_version_would_fail_flashinfer_s_import(
    flashinfer_site, monkeypatch
):
    flashinfer_site.flashinfer(compiled=ALL)
    flashinfer_site.distribution("flashinfer-cubin", "0.6.13", "flashinfer_cubin/__init__.py")
    assert "flashinfer-python 0.6.12 and flashinfer-cubin 0.6.13 must have one version" in reason()
    monkeypatch.setenv("FLASHINFER_DISABLE_VERSION_CHECK", "1")
    assert served() == (True, True)


def test_heads_and_dtypes_that_no_module_takes(flashinfer_site):
    flashinfer_site.flashinfer(compiled=ALL)
    assert "found 12 query heads and 8 KV heads" in reason(num_q_heads=12)
    assert "needs K and V in the dtype of q, bfloat16; got float16" in reason(kv_dtype="float16")
