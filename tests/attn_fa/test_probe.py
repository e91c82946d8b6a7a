"""The probe says which version can run, what the others lack and how to get it."""

import pytest

from minisgl.plugins import RankTable, Supported, Unsupported
from minisgl_attn_fa import installed
from minisgl_attn_fa import ranks as rank_rules
from minisgl_attn_fa.edges import why_not
from minisgl_attn_fa.probe import probe
from support.kernel_site import query

TABLE = RankTable(
    source="a test",
    prefill={(16, 2): 71, (64, 2): 72, (128, 2): 73},
    decode={(16, 2): 31, (64, 2): 32, (128, 2): 33},
)


def reason(**changed) -> str:
    answer = probe(query(**changed))
    assert isinstance(answer, Unsupported), answer
    return answer.reason


def ranks(**changed) -> tuple[int, int]:
    answer = probe(query(**changed))
    assert isinstance(answer, Supported), answer
    assert answer.prefill_rank is not None
    assert answer.decode_rank is not None
    return answer.prefill_rank, answer.decode_rank


def test_without_any_it_says_what_to_install(flash_attn_site):
    text = reason()
    assert "FlashAttention 4 needs flash-attn-4<4.1,>=4.0.0b36, which is not installed" in text
    assert "pip install 'minisgl-attn-fa[fa4]'" in text
    assert "FlashAttention 3 needs flash-attn-3" in text
    assert "FlashAttention 2 takes pages of multiples of 256 tokens, found 16" in text
    assert "'minisgl-attn-fa[fa2]', which compiles for an hour" in reason(page_size=256)


def test_what_can_never_run_is_said_instead_of_what_is_not_installed(flash_attn_site):
    text = reason(compute_capability=(8, 0))
    assert "FlashAttention 4 reads pages on compute capability 9.x to 11.x only, found 8.0" in text
    assert "FlashAttention 3 needs compute capability 9.x, found 8.0" in text
    assert "fa4" not in text


@pytest.mark.parametrize(
    ("install", "version"),
    [("fa4", "4.0.0b35"), ("fa4", "4.1.0"), ("fa4", "mine"), ("fa3", "2.9"), ("fa2", "2.6.3")],
)
def test_a_version_outside_the_range_is_untested(flash_attn_site, install, version):
    getattr(flash_attn_site, install)(version)
    text = reason(page_size=256)
    assert f"found {version}, which is untested: install '" in text


@pytest.mark.parametrize("version", ["4.0.0b36", "4.0.0b40", "4.0.0", "4.0.2"])
def test_releases_before_the_final_one_are_in_the_range(flash_attn_site, version):
    flash_attn_site.fa4(version)
    assert ranks()


@pytest.fixture
def table(monkeypatch):
    monkeypatch.setattr(rank_rules, "RANKS", {"fa": TABLE})


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"page_size": 128}, (73, 33)),
        ({"page_size": 16}, (71, 31)),
        ({"page_size": 256}, (72, 32)),
        ({"page_size": 128, "head_dim": 256}, (72, 32)),
    ],
)
def test_version_4_has_the_ranks_that_were_measured_for_such_pages(
    flash_attn_site, changed, expected
):
    """Only pages of 128 tokens are loaded by TMA, so only they rank as those do."""
    flash_attn_site.fa4()
    assert ranks(**changed) == expected
    answer = probe(query(**changed))
    assert isinstance(answer, Supported)
    assert answer.source == "a test"


def test_version_3_is_between_what_was_measured_and_the_reference(flash_attn_site):
    flash_attn_site.fa3()
    assert all(0 < rank < 100 for rank in ranks())


@pytest.mark.usefixtures("table")
def test_what_nobody_measured_is_above_the_reference_alone(flash_attn_site):
    flash_attn_site.fa2()
    assert all(0 < rank < 10 for rank in ranks(page_size=256))
    flash_attn_site.fa4()
    prefill, _ = ranks(compute_capability=(10, 0), page_size=128)
    assert 0 < prefill < 10


@pytest.mark.parametrize(
    ("version", "changed", "expected"),
    [
        ("fa4", {"compute_capability": (8, 9)}, "9.x to 11.x only, found 8.9"),
        ("fa4", {"compute_capability": (12, 0)}, "9.x to 11.x only, found 12.0"),
        ("fa4", {"logit_soft_cap": True}, "compiles a cap"),
        ("fa4", {"compute_capability": (10, 0), "head_dim": 192}, "up to 128 on compute capab"),
        ("fa4", {"sliding_window": True}, None),
        ("fa4", {"page_size": 1, "head_dim": 256}, None),
        ("fa4", {"head_dim": 80}, None),
        ("fa4", {"head_dim": 192}, None),
        ("fa4", {"head_dim": 72}, "16 divides up to 128, of 192 and of 256; the model has 72"),
        ("fa4", {"head_dim": 160}, "the model has 160"),
        ("fa3", {"head_dim": 160}, None),
        ("fa3", {"compute_capability": (10, 0)}, "needs compute capability 9.x, found 10.0"),
        ("fa3", {"logit_soft_cap": True, "sliding_window": True}, None),
        ("fa2", {"page_size": 128}, "multiples of 256 tokens, found 128"),
        ("fa2", {"page_size": 256, "compute_capability": (8, 0)}, None),
        ("fa2", {"page_size": 256, "logit_soft_cap": True, "sliding_window": True}, None),
        ("fa4", {"head_dim": 512}, "needs head dims that 8 divides, up to 256; the model has 512"),
        ("fa3", {"head_dim": 100}, "the model has 100"),
        ("fa4", {"num_q_heads": 12}, "found 12 query heads and 8 KV heads"),
        ("fa4", {"kv_dtype": "float16"}, "needs K and V in the dtype of q, bfloat16; got float16"),
    ],
)
def test_edges(flash_attn_site, version, changed, expected):
    for install in ("fa4", "fa3"):
        getattr(flash_attn_site, install)()
    if version == "fa2":
        flash_attn_site.fa2()
    found = why_not(version, query(**changed))
    assert (found is None) if expected is None else expected in str(found)


def test_files_that_another_version_hides_are_noticed(flash_attn_site):
    flash_attn_site.fa4()
    (flash_attn_site.root / "flash_attn" / "cute" / "paged_kv.py").unlink()
    text = reason()
    assert (
        "flash-attn-4 4.0.0b36 is listed as installed, but flash_attn/cute/paged_kv.py is" in text
    )
    assert "install it again, last" in text


def test_both_versions_of_one_import_name_can_be_there(flash_attn_site):
    flash_attn_site.fa2()
    assert "is not installed" in str(installed.why_unusable("fa4"))
    flash_attn_site.fa4()
    assert installed.why_unusable("fa4") is None
    assert installed.why_unusable("fa2") is None


def test_what_version_4_imports_must_be_there(flash_attn_site, monkeypatch):
    flash_attn_site.fa4()
    find = installed.find_spec
    lacking = {"cutlass", "quack", "tvm_ffi"}
    monkeypatch.setattr(
        installed, "find_spec", lambda name: None if name in lacking else find(name)
    )
    assert "flash-attn-4 4.0.0b36 needs nvidia-cutlass-dsl, which is not installed" in reason()
    lacking.remove("cutlass")
    assert "needs quack-kernels" in reason()
