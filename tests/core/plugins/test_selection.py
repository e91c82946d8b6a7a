"""Which backend is chosen, and what is said when none can be."""

import logging
from dataclasses import fields

import pytest
import torch

from minisgl.errors import (
    AmbiguousBackendError,
    SettingsError,
    UnknownBackendError,
    UnsupportedBackendError,
)
from minisgl.kernel import OpTable, Rotation
from minisgl.plugins import BackendQuery
from minisgl.plugins.decisions import format_decisions, log_decisions
from minisgl.plugins.selection import (
    explain_attention,
    explain_moe,
    explain_ops,
    select_attention,
    select_kv_pool,
    select_moe,
    select_ops,
    select_prefix_cache,
)
from support import plugin_code


def query(**changes):
    return BackendQuery(
        **{
            "device": "cpu",
            "compute_capability": None,
            "dtype": "float32",
            "kv_dtype": "float32",
            "page_size": 16,
            "num_q_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 64,
            **changes,
        }
    )


def names(selection):
    return selection.prefill.name, selection.decode.name


def row_of(table, name, phase="prefill"):
    (row,) = [row for row in table if row.name == name and row.phase == phase]
    return row


def test_auto_takes_the_best_rank_of_each_phase(plugin_site):
    plugin_site.add("acme-p", plugin_code.attention("p", "Supported(9, 1)"))
    plugin_site.add("acme-d", plugin_code.attention("d", "Supported(1, 9)"))
    selection = select_attention(plugin_site.load(), query())
    assert names(selection) == ("p", "d")
    assert selection.choice == "acme-p:p,acme-d:d"
    assert row_of(selection.table, "p").outcome == "chosen"
    assert row_of(selection.table, "torch").outcome == "usable"
    assert row_of(selection.table, "torch").reason == "p has rank 9"


def test_the_resolved_choice_chooses_the_same_again(plugin_site):
    plugin_site.add("acme-p", plugin_code.attention("p", "Supported(9, None)"))
    host = plugin_site.load()
    first = select_attention(host, query())
    assert names(first) == ("p", "torch")
    assert names(select_attention(host, query(), first.choice)) == ("p", "torch")


def test_a_tie_goes_to_the_first_name_and_is_logged(plugin_site, caplog):
    plugin_site.add("acme-x", plugin_code.attention("bbb"))
    plugin_site.add("acme-y", plugin_code.attention("aaa"))
    with caplog.at_level(logging.INFO, "minisgl"):
        selection = select_attention(plugin_site.load(), query())
    assert names(selection) == ("aaa", "aaa")
    assert "attention (prefill): aaa and bbb share rank 5; aaa comes first" in caplog.text


def test_a_pair_and_a_single_name(plugin_site):
    plugin_site.add("acme", plugin_code.attention())
    host = plugin_site.load()
    assert names(select_attention(host, query(), "torch,acme")) == ("torch", "acme")
    assert names(select_attention(host, query(), "torch")) == ("torch", "torch")
    assert names(select_attention(host, query(), "auto,torch")) == ("acme", "torch")


def two(plugin_site, first, second):
    """Offer two backends, ``aaa`` and ``bbb``, with these capabilities."""
    plugin_site.add("acme-a", plugin_code.attention("aaa", **first))
    plugin_site.add("acme-b", plugin_code.attention("bbb", **second))
    return plugin_site.load()


NO_PAIR = "attention.backend='aaa,bbb' cannot be a pair: "


@pytest.mark.parametrize(
    ("first", "second", "layout", "message"),
    [
        (
            {"kv_layout": "HND"},
            {},
            "NHD",
            (
                "'aaa' reads pages of layout HND and 'bbb' of layout NHD, but both read one KV "
                "pool, whose pages are NHD. Set attention.backend to backends of that layout "
                "(bbb, torch, triton), or cache.pool to a pool of another one."
            ),
        ),
        (
            {},
            {"kv_layout": "HND"},
            "HND",
            (
                "'aaa' reads pages of layout NHD and 'bbb' of layout HND, but both read one KV "
                "pool, whose pages are HND. Set attention.backend to backends of that layout "
                "(bbb), or cache.pool to a pool of another one."
            ),
        ),
        (
            {},
            {},
            "HND",
            (
                "'aaa' reads pages of layout NHD and 'bbb' of layout NHD, but both read one KV "
                "pool, whose pages are HND. Set attention.backend to backends of that layout "
                "(there are none), or cache.pool to a pool of another one."
            ),
        ),
        (
            {"page_sizes": (256,)},
            {"page_sizes": (16, 32, 64)},
            "NHD",
            (
                "'aaa' takes pages of 256 tokens and 'bbb' takes pages of 16, 32 or 64 tokens, "
                "but both read one KV pool, with cache.page_size=16. No page size suits both: "
                "set attention.backend to one of them, or to others."
            ),
        ),
        (
            {"page_sizes": (32, 64, 128)},
            {"page_sizes": (16, 32, 64)},
            "NHD",
            (
                "'aaa' takes pages of 32, 64 or 128 tokens and 'bbb' takes pages of 16, 32 or "
                "64 tokens, but both read one KV pool, with cache.page_size=16. Set "
                "cache.page_size to 32 or 64."
            ),
        ),
        (
            {},
            {"page_sizes": (128,)},
            "NHD",
            (
                "'aaa' takes pages of any size and 'bbb' takes pages of 128 tokens, but both "
                "read one KV pool, with cache.page_size=16. Set cache.page_size to 128."
            ),
        ),
    ],
)
def test_a_pair_that_cannot_read_one_pool(plugin_site, first, second, layout, message):
    host = two(plugin_site, first, second)
    with pytest.raises(UnsupportedBackendError) as caught:
        select_attention(host, query(kv_layout=layout), "aaa,bbb")
    assert str(caught.value) == NO_PAIR + message


def test_a_pair_of_one_layout_and_page_size(plugin_site):
    pages = {"page_sizes": (16, 32)}
    host = two(plugin_site, {"kv_layout": "HND", **pages}, {"kv_layout": "HND", **pages})
    chosen = select_attention(host, query(kv_layout="HND"), "aaa,bbb")
    assert names(chosen) == ("aaa", "bbb")
    assert names(select_attention(host, query(kv_layout="HND"), chosen.choice)) == ("aaa", "bbb")


def test_auto_leaves_out_what_does_not_read_the_pool_s_layout(plugin_site):
    host = two(plugin_site, {"kv_layout": "HND"}, {})
    chosen = select_attention(host, query())
    assert names(chosen) == ("bbb", "bbb")
    assert row_of(chosen.table, "aaa").reason == "needs KV layout HND, found NHD"
    assert names(select_attention(host, query(), "bbb,auto")) == ("bbb", "bbb")
    assert not [one for one in chosen.others if "aaa" in one.name]


def test_the_pool_s_layout_is_no_requirement_of_experts_or_pools(plugin_site):
    plugin_site.add("acme", plugin_code.moe())
    host = plugin_site.load()
    assert select_moe(host, query(num_experts=4, kv_layout="HND"), "acme").record.name == "acme"
    assert select_kv_pool(host, query(kv_layout="HND"), "mha").record.name == "mha"


def test_one_name_for_both_phases_must_serve_both(plugin_site):
    plugin_site.add("acme", plugin_code.attention(phases=("decode",)))
    with pytest.raises(UnsupportedBackendError) as caught:
        select_attention(plugin_site.load(), query(), "acme")
    assert str(caught.value) == (
        "attention.backend (prefill)='acme' cannot run here: it serves decode, not prefill."
        " Usable: torch. For decode alone: attention.backend='auto,acme'."
    )


def test_experts_and_pools_have_no_part_in_windows_and_soft_caps(plugin_site):
    """Catches: a record without them, refused for Mixtral with a window."""
    plugin_site.add("acme", plugin_code.moe())
    host, asked = plugin_site.load(), query(sliding_window=True, logit_soft_cap=True)
    assert row_of(explain_moe(host, asked), "acme", "any").outcome == "chosen"


@pytest.mark.parametrize(
    ("capabilities", "changes", "reason"),
    [
        ({"devices": ("cuda",)}, {}, "needs device cuda, found cpu"),
        ({"dtypes": ("bfloat16", "float16")}, {}, "needs dtype bfloat16 or float16, found float32"),
        ({"kv_dtypes": ("fp8",)}, {}, "needs KV dtype fp8, found float32"),
        ({"page_sizes": (32, 64, 128)}, {}, "needs page size 32, 64 or 128, found 16"),
        ({"head_dims": (128,)}, {}, "needs head dim 128, found 64"),
        (
            {"min_compute_capability": (8, 0)},
            {"device": "cuda", "compute_capability": (7, 5)},
            "needs compute capability 8.0, found 7.5",
        ),
        (
            {"min_compute_capability": (8, 0)},
            {"device": "cuda"},
            "needs compute capability 8.0, found none",
        ),
        ({}, {"sliding_window": True}, "the model has sliding-window layers, it implements none"),
        ({}, {"logit_soft_cap": True}, "the model caps attention scores, it does not implement"),
    ],
)
def test_capabilities_are_checked_before_the_probe(plugin_site, capabilities, changes, reason):
    code = plugin_code.attention(answer="1 / 0", **capabilities)
    plugin_site.add("acme", code)
    host = plugin_site.load()
    row = row_of(explain_attention(host, query(**changes)), "acme")
    assert (row.outcome, row.rank) == ("refused", None)
    assert row.reason.startswith(reason)
    with pytest.raises(UnsupportedBackendError, match=r"cannot run here: .* Usable: torch\."):
        select_attention(host, query(**changes), "acme")


def test_others_are_those_that_could_decode_as_well(plugin_site):
    plugin_site.add("acme", plugin_code.attention("fast", "Supported(9, 9)"))
    plugin_site.add("other", plugin_code.attention("slow", "Supported(None, 5)"))
    plugin_site.add("third", plugin_code.attention("early", "Supported(5, None)"))
    host = plugin_site.load()
    assert [one.record.name for one in select_attention(host, query()).others] == ["slow"]
    assert [one.record.name for one in select_attention(host, query(), "torch,auto").others] == [
        "slow"
    ]
    assert select_attention(host, query(), "fast").others == (), "a name is a name"
    assert select_attention(host, query(), "auto,fast").others == ()


def test_a_gpu_that_is_good_enough_is_taken(plugin_site):
    plugin_site.add(
        "acme", plugin_code.attention(answer="Supported(200, 200)", min_compute_capability=(8, 0))
    )
    found = query(device="cuda", compute_capability=(10, 0))
    assert names(select_attention(plugin_site.load(), found)) == ("acme", "acme")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("Unsupported('needs 4 heads, found 2')", "needs 4 heads, found 2"),
        ("1 / 0", "its probe raised ZeroDivisionError: division by zero"),
        ("True", "its probe returned True"),
        ("Supported(None, 3)", "it does not serve prefill"),
    ],
)
def test_a_probe_that_says_no(plugin_site, answer, reason):
    plugin_site.add("acme", plugin_code.attention(answer=answer))
    host = plugin_site.load()
    selection = select_attention(host, query())
    assert selection.prefill.name == "torch"
    assert row_of(selection.table, "acme").reason == reason
    with pytest.raises(UnsupportedBackendError) as caught:
        select_attention(host, query(), "acme")
    assert f"'acme' cannot run here: {reason}. Usable: torch." in str(caught.value)
    assert caught.value.exit_code == 3


def test_unknown_name_cites_the_nearest_and_the_failed_and_disabled_plugins(plugin_site):
    plugin_site.add("acme-attn", "import nothing_so_called")
    plugin_site.add("other", plugin_code.attention("other"))
    host = plugin_site.load(disabled=["other"])
    with pytest.raises(UnknownBackendError) as caught:
        select_attention(host, query(), "trch")
    assert str(caught.value) == (
        "attention.backend='trch' is not installed. Installed: torch, triton. Nearest: 'torch'."
        " Failed to load: acme-attn 1.0 (import: No module named 'nothing_so_called')."
        " Disabled: other."
    )


def test_a_name_that_two_offer(plugin_site):
    plugin_site.add("acme-a", plugin_code.attention())
    plugin_site.add("acme-b", plugin_code.attention())
    host = plugin_site.load()
    selection = select_attention(host, query())
    assert names(selection) == ("torch", "torch")
    reasons = {row.reason for row in selection.table if row.name == "acme"}
    assert reasons == {"ambiguous: offered by acme-a and acme-b"}
    with pytest.raises(AmbiguousBackendError) as caught:
        select_attention(host, query(), "acme")
    assert str(caught.value) == (
        "attention.backend='acme' is offered by acme-a 1.0 and acme-b 1.0. Write 'acme-a:acme'"
        " or 'acme-b:acme', or disable one: --disable-plugin acme-a."
    )
    assert select_attention(host, query(), "Acme_B:acme").choice == "acme-b:acme,acme-b:acme"


def test_an_unknown_qualified_name(plugin_site):
    with pytest.raises(UnknownBackendError, match="Nearest: 'minisgl-core:torch'"):
        select_attention(plugin_site.load(), query(), "minisgl-cor:torch")


def test_an_architecture_that_two_offer_cannot_be_qualified(plugin_site):
    code = """
    from minisgl.plugins import ModelRecord, hookimpl
    @hookimpl
    def minisgl_models():
        return (ModelRecord(architectures=("XForCausalLM",), config_reader="x:r", model="x:X",
                            summary=""),)
    """
    plugin_site.add("acme-a", code)
    host = plugin_site.load()
    assert host.model_for(["Unknown", "XForCausalLM"]).model == "x:X"
    plugin_site.add("acme-b", code)
    with pytest.raises(AmbiguousBackendError) as caught:
        plugin_site.load().model_for(["XForCausalLM"])
    assert "acme-b 1.0. Disable one: --disable-plugin acme-a." in str(caught.value)


def test_an_architecture_that_nobody_offers(plugin_site):
    with pytest.raises(UnknownBackendError) as caught:
        plugin_site.load().model_for(["LlamaForCausalLN"])
    message = str(caught.value)
    assert message.startswith("architecture='LlamaForCausalLN' is not installed. Installed: ")
    assert "Nearest: 'LlamaForCausalLM'." in message
    assert message.endswith("pip install -U minisgl-models")


def test_moe_counts_the_larger_rank(plugin_site):
    plugin_site.add("acme", plugin_code.moe(answer="Supported(None, 4)"))
    selection = select_moe(plugin_site.load(), query(num_experts=8))
    assert (selection.record.name, selection.choice) == ("acme", "acme:acme")
    assert selection.table[0].rank == 4


def test_pool_and_prefix_cache_of_core(plugin_site):
    host = plugin_site.load()
    assert select_kv_pool(host, query(), "auto").record.name == "mha"
    assert select_prefix_cache(host, "naive").record.name == "naive"
    with pytest.raises(UnsupportedBackendError, match="needs KV dtype float32, bfloat16 or"):
        select_kv_pool(host, query(kv_dtype="float8_e4m3fn"), "auto")
    with pytest.raises(UnknownBackendError, match=r"Installed: naive, radix. Nearest: 'radix'"):
        select_prefix_cache(host, "radx")


def test_options_are_validated_by_the_backend_s_settings_class(plugin_site):
    plugin_site.add("acme-attn", plugin_code.attention())
    host = plugin_site.load()
    selection = select_attention(host, query(), "acme", {"acme": {"width": "7"}})
    assert selection.prefill_settings.width == 7
    assert select_attention(host, query(), "acme").decode_settings.width == 3
    qualified = {"acme-attn:acme": {"width": 8}}
    assert select_attention(host, query(), "acme", qualified).decode_settings.width == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"acme": {"with": 1}}, "Unknown option 'backend_options.acme.with'. acme has: width."),
        ({"acme": {"width": "x"}}, "backend_options.acme.width='x' must be a valid integer"),
        (
            {"acmee": {"width": 1}},
            "all-reduce, all-to-all, mha, naive, radix, torch, triton, xgrammar. Nearest: 'acme'.",
        ),
        ({"radix": {"a": 1}}, "Unknown option 'backend_options.radix.a'. radix has: none."),
        ({"acme": {}, "acme-attn:acme": {}}, "both set options of acme-attn:acme. Keep one."),
    ],
)
def test_options_that_are_wrong_even_of_a_backend_that_is_not_chosen(plugin_site, options, message):
    plugin_site.add("acme-attn", plugin_code.attention())
    host = plugin_site.load()
    with pytest.raises(SettingsError) as caught:
        select_attention(host, query(), "torch", options)
    assert message in str(caught.value)


def test_an_option_that_is_a_path_says_so(plugin_site):
    code = plugin_code.attention().replace("width: int = 3", "width: 'pathlib.Path' = None")
    plugin_site.add("acme-attn", f"import pathlib\n{code}")
    with pytest.raises(SettingsError, match=r"backend_options\.acme\.width=3 must be a path\.$"):
        select_attention(plugin_site.load(), query(), "torch", {"acme": {"width": 3}})


def test_options_under_a_name_that_two_distributions_offer(plugin_site):
    plugin_site.add("acme-a", plugin_code.attention())
    plugin_site.add("acme-b", plugin_code.attention())
    host = plugin_site.load()
    with pytest.raises(SettingsError, match=r"is ambiguous: acme-a and acme-b offer it"):
        select_attention(host, query(), "torch", {"acme": {"width": 1}})
    options = {"acme-b:acme": {"width": 1}}
    assert select_attention(host, query(), "acme-b:acme", options).prefill_settings.width == 1
    assert select_attention(host, query(), "acme-a:acme", options).prefill_settings.width == 3


def test_attention_and_moe_of_one_name_each_take_their_own_options(plugin_site):
    code = plugin_code.attention() + plugin_code.moe().replace("width", "depth").replace(
        "Options", "MoeOptions"
    )
    plugin_site.add("acme", code)
    host = plugin_site.load()
    options = {"acme": {"width": 1, "depth": 2}}
    assert select_attention(host, query(), "acme", options).prefill_settings.width == 1
    assert select_moe(host, query(), "acme", options).settings.depth == 2


def test_attention_and_moe_of_one_name_are_no_rivals_if_two_distributions_offer_them(plugin_site):
    plugin_site.add("acme-attn", plugin_code.attention())
    plugin_site.add("acme-moe", plugin_code.moe().replace("width", "depth"))
    options = {"acme": {"width": 1, "depth": 2}}
    host = plugin_site.load()
    assert select_attention(host, query(), "acme", options).prefill_settings.width == 1
    assert select_moe(host, query(), "acme", options).settings.depth == 2


def test_the_environment_writes_an_underscore_for_a_dash(plugin_site):
    plugin_site.add("acme", plugin_code.attention("acme-x"))
    selection = select_attention(plugin_site.load(), query(), "acme-x", {"acme_x": {"width": 1}})
    assert selection.prefill_settings.width == 1


def test_ops_take_the_best_rank_above_the_reference(plugin_site):
    plugin_site.add("acme-a", plugin_code.op("slow", 0, "lambda: max"))
    plugin_site.add("acme-b", plugin_code.op("good", 3, "lambda: len"))
    plugin_site.add("acme-c", plugin_code.op("better", 4, "lambda: min"))
    plugin_site.add("acme-d", plugin_code.op("worse", -1, "lambda: sum", "silu_and_mul"))
    table = select_ops(plugin_site.load(), query())
    assert table.rms_norm is min
    assert table.silu_and_mul.__module__ == "minisgl.kernel.reference"


def test_an_op_that_two_offer_under_one_name_is_skipped(plugin_site):
    plugin_site.add("acme-a", plugin_code.op("fast", 3))
    plugin_site.add("acme-b", plugin_code.op("fast", 4))
    table = select_ops(plugin_site.load(), query())
    assert table.rms_norm.__module__ == "minisgl.kernel.reference"


def test_an_op_made_of_others_is_made_of_the_best_of_them(plugin_site):
    """Who offers ``rope`` alone is not passed over because ``rope_store`` has a reference."""
    noted = "lambda: lambda qk, heads, *a, **k: (qk[:, :heads] + 1, qk[:, heads:])"
    plugin_site.add("acme-a", plugin_code.op("fast", 3, noted, "rope"))
    table = select_ops(plugin_site.load(), query())
    qkv, slots = torch.zeros(2, 4, 8), torch.tensor([1, -1])
    pools = torch.zeros(2, 3, 1, 8)
    rotation = Rotation(slots, qkv)
    q = table.rope_store(qkv, 2, 1, rotation, slots, *pools, q_norm=None, k_norm=None, norm_eps=0.0)
    assert q.eq(1).all()
    assert q.shape == (2, 2, 8)
    plugin_site.add("acme-b", plugin_code.op("faster", 3, "lambda: len", "rope_store"))
    assert select_ops(plugin_site.load(), query()).rope_store.__name__ == "len"


PLAIN_EVERYWHERE = {
    f"op {name}" for name in ("mask_logits", "bias_logits", "ban_sequences", "token_logprobs")
}
"""Batched operations of torch serve any device."""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "needs a CUDA device, the device is cpu"),
        (
            {"device": "cuda", "compute_capability": (7, 5)},
            "needs compute capability 8.0, found 7.5",
        ),
        (
            {"device": "cuda", "compute_capability": (9, 0), "dtype": "float64"},
            "needs float32, bfloat16 or float16, the model runs in float64",
        ),
        ({"device": "cuda", "compute_capability": (9, 0), "dtype": "bfloat16"}, None),
    ],
)
def test_triton_says_where_it_can_run(plugin_site, changes, reason, monkeypatch):
    host = plugin_site.load()
    monkeypatch.setattr("minisgl.plugins.builtin.find_spec", lambda name: name)
    names = [entry.name for entry in fields(OpTable)]
    rows = [row for row in explain_ops(host, query(**changes), names) if row.name == "triton"]
    assert {row.kind for row in rows} == {f"op {name}" for name in names} - PLAIN_EVERYWHERE
    outcome = "chosen" if reason is None else "refused"
    assert {(row.outcome, row.reason) for row in rows} == {(outcome, reason or "")}


def test_triton_leaves_products_in_float32_to_cublas(plugin_site, monkeypatch):
    monkeypatch.setattr("minisgl.plugins.builtin.find_spec", lambda name: name)
    on_card = query(device="cuda", compute_capability=(9, 0))
    names = [entry.name for entry in fields(OpTable)]
    rows = [r for r in explain_ops(plugin_site.load(), on_card, names) if r.name == "triton"]
    refused = {row.kind: row.reason for row in rows if row.outcome == "refused"}
    products = ("linear", "linear_parts", "add_norm_linear", "add_norm_gated")
    reason = "needs a 16-bit dtype, the model runs in float32"
    assert refused == {f"op {name}": reason for name in products}


def test_triton_is_refused_where_it_is_not_installed(plugin_site, monkeypatch):
    monkeypatch.setattr("minisgl.plugins.builtin.find_spec", lambda name: None)
    on_card = query(device="cuda", compute_capability=(9, 0))
    rows = explain_ops(plugin_site.load(), on_card, ["rms_norm"])
    (row,) = [row for row in rows if (row.kind, row.name) == ("op rms_norm", "triton")]
    assert row.reason == "needs the package triton, which is not installed"


def test_an_op_that_cannot_be_loaded_stops_the_start(plugin_site):
    plugin_site.add("acme-a", plugin_code.op("fast", 3, "lambda: 1 / 0"))
    with pytest.raises(UnsupportedBackendError) as caught:
        select_ops(plugin_site.load(), query())
    assert str(caught.value) == (
        "op 'rms_norm': 'fast' of acme-a 1.0 was chosen and cannot be loaded:"
        " ZeroDivisionError: division by zero. Without it: --disable-plugin acme-a."
    )


def test_an_op_that_does_not_exist_is_refused_in_the_table(plugin_site):
    plugin_site.add("acme-a", plugin_code.op("fast", 3, entry="rms_nrm"))
    host = plugin_site.load()
    (row,) = [r for r in explain_ops(host, query(), ["rms_norm"]) if r.name == "fast"]
    assert (row.outcome, row.reason) == ("refused", "no such op; known: rms_norm")


def test_the_decision_table_is_one_log_message(plugin_site, caplog):
    plugin_site.add("acme", plugin_code.attention(devices=("cuda",)))
    table = select_attention(plugin_site.load(), query()).table
    with caplog.at_level(logging.INFO, "minisgl"):
        log_decisions(table)
    (record,) = caplog.records
    assert format_decisions(table) in record.getMessage()
    assert "refused  -     needs device cuda, found cpu" in record.getMessage()
