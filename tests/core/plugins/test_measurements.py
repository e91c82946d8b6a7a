"""Ranks from measurements: how they follow, and what a wrong file is told."""

import pytest

from minisgl.errors import SettingsError
from minisgl.plugins import BackendQuery, RankTable
from minisgl.plugins.measurements import read_measurements
from minisgl.plugins.selection import explain_attention, select_attention
from support import plugin_code
from support.measured_cells import cell, write_measurements

A, B, C = "acme-a:a", "acme-b:b", "acme-c:c"
SMALL, LARGE = "decode:1x512:16/8x128:p16", "decode:64x512:16/8x128:p16"
WIDE = "decode:1x512:40/8x128:p64"
PROMPT = "prefill:1x512:16/8x128:p16"


def query(**changes):
    return BackendQuery(
        **{
            "device": "cpu", "compute_capability": None, "dtype": "bfloat16",
            "kv_dtype": "bfloat16", "page_size": 16, "num_q_heads": 16, "num_kv_heads": 8,
            "head_dim": 128, **changes,
        }
    )  # fmt: skip


@pytest.fixture
def measured(tmp_path):
    def read(cells, max_rows=None, **changes):
        path = write_measurements(tmp_path / "h200.json", cells, **changes)
        return read_measurements(path, max_rows)

    return read


def rank_of(found, backend, asked=None, phase="decode"):
    judged = found.judge(backend, asked or query(), phase)
    return None if judged is None else judged.rank


def test_a_rank_is_the_mean_share_of_the_fastest_one_s_speed(measured):
    found = measured([
        cell(SMALL, A, 10.0), cell(SMALL, B, 40.0),
        cell(LARGE, A, 20.0), cell(LARGE, B, 20.0),
    ])  # fmt: skip
    assert rank_of(found, A) == 100
    assert rank_of(found, B) == 50, "geometric: 1/4 and 1"
    assert rank_of(found, C) is None


def test_a_backend_is_compared_in_the_cases_that_it_ran(measured):
    found = measured([
        cell(SMALL, A, 10.0), cell(SMALL, B, None, "refused"),
        cell(LARGE, A, 40.0), cell(LARGE, B, 20.0),
    ])  # fmt: skip
    assert rank_of(found, B) == 100
    assert rank_of(found, A) == 71


@pytest.mark.parametrize(
    ("status", "text"),
    [("wrong", "it computed something wrong in decode:64x512"), ("failed", "it failed in decode")],
)
def test_what_was_wrong_or_failed_once_has_no_rank_and_slows_nobody(measured, status, text):
    found = measured([
        cell(SMALL, A, 10.0), cell(SMALL, B, 1.0),
        cell(LARGE, A, 10.0), cell(LARGE, B, 1.0 if status == "wrong" else None, status),
        cell(PROMPT, B, 5.0),
    ])  # fmt: skip
    judged = found.judge(B, query(), "decode")
    assert judged.rank is None
    assert judged.reason.startswith(text)
    assert rank_of(found, A) == 100
    assert rank_of(found, B, phase="prefill") == 100, "the other phase is another question"


def test_the_nearest_heads_and_page_size_count(measured):
    found = measured([
        cell(SMALL, A, 10.0), cell(SMALL, B, 20.0), cell(WIDE, A, 20.0), cell(WIDE, B, 10.0),
    ])  # fmt: skip
    assert rank_of(found, A) == 100
    assert rank_of(found, A, query(num_q_heads=32, page_size=128)) == 50
    source = found.judge(A, query(num_q_heads=32, page_size=128), "decode").source
    assert "measured on NVIDIA H200" in source
    assert source.endswith("2026-12-01: 40/8x128 heads, page size 64")


def test_rows_that_never_run_do_not_count(measured):
    cells = [
        cell(SMALL, A, 10.0), cell(SMALL, B, 20.0), cell(LARGE, A, 20.0), cell(LARGE, B, 10.0),
    ]  # fmt: skip
    assert rank_of(measured(cells, max_rows=1), B) == 50
    assert rank_of(measured(cells, max_rows=2), B) == 71, "the next larger number of rows counts"
    assert rank_of(measured(cells, max_rows=1000), B) == 71


def test_published_cases_are_beside_the_grid(measured):
    found = measured([
        cell(SMALL, A, 10.0), cell(SMALL, B, 20.0), cell(LARGE, A, 99.0, part="published"),
        cell(LARGE, B, 1.0, part="published"),
    ])  # fmt: skip
    assert rank_of(found, B) == 50


def test_another_backend_is_worth_a_try_if_it_was_faster_anywhere(measured):
    found = measured([
        cell(SMALL, A, 10.0), cell(SMALL, B, 9.0), cell(SMALL, C, 9.6),
        cell(LARGE, A, 10.0), cell(LARGE, B, 30.0), cell(LARGE, C, 10.0),
    ])  # fmt: skip
    assert found.worth_a_try(B, A, query())
    assert not found.worth_a_try(C, A, query()), "4 % is noise"
    assert found.worth_a_try("acme-d:d", A, query()), "nobody knows"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file or directory; write one with minisgl bench kernels"),
        ("{", "is no file of measurements: Input data was truncated"),
        ('{"benchmark": "offline"}', "holds the benchmark 'offline', not attention"),
        ('{"benchmark": "attention", "format": 2}', "has format 2, this version reads 1; measure"),
        ('{"benchmark": "attention"}', "has format None, this version reads 1"),
        ('{"benchmark": "attention", "format": 1}', "missing required field `date`"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path, content, message):
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SettingsError) as caught:
        read_measurements(path)
    assert str(caught.value).startswith(f"attention.measurements={str(path)!r} ")
    assert message in str(caught.value)


def test_a_file_in_which_nothing_ran_is_refused(measured):
    with pytest.raises(SettingsError, match="holds no case of the grid that any backend ran"):
        measured([cell(SMALL, A, None, "skipped")])
    with pytest.raises(SettingsError, match=r"Invalid enum value 'fine' - at `\$.cells.0..st"):
        measured([{**cell(SMALL, A, 1.0), "status": "fine"}])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("page_size", 0), ("num_kv_heads", -8), ("head_dim", 10**400), ("num_q_heads", 1.5),
        ("rows", "4"), ("us", 0.0), ("us", -3.0), ("us", 1e300),
    ],
)  # fmt: skip
def test_numbers_from_which_no_rank_follows_are_refused(measured, field, value):
    """Catches: a logarithm of nothing in the middle of a start."""
    bad = {**cell(LARGE, B, 1.0), field: value}
    with pytest.raises(SettingsError, match=r"is no file of measurements: .*write one with"):
        measured([cell(SMALL, A, 1.0), bad]).judge(A, query(), "decode")


def test_a_file_of_another_device_or_dtype_is_refused(measured):
    found = measured([cell(SMALL, A, 10.0)])
    found.check("NVIDIA H200", "bfloat16")
    with pytest.raises(SettingsError, match=r"of device NVIDIA H200, this is NVIDIA L4; measure h"):
        found.check("NVIDIA L4", "bfloat16")
    with pytest.raises(SettingsError, match=r"runs in float16; .* --dtype float16"):
        found.check("NVIDIA H200", "float16")


@pytest.fixture
def host(plugin_site):
    plugin_site.add("acme-a", plugin_code.attention("a", "Supported(5, 5)"))
    plugin_site.add("acme-b", plugin_code.attention("b", "Supported(7, 7, 'a guess')"))
    plugin_site.add("acme-c", plugin_code.attention("c", "Supported(900, 900)"))
    return plugin_site.load()


def test_auto_goes_by_what_was_measured_and_then_by_records(host, measured):
    found = measured([
        cell(SMALL, A, 10.0), cell(SMALL, B, 20.0), cell(PROMPT, A, 20.0), cell(PROMPT, B, 10.0),
    ])  # fmt: skip
    assert select_attention(host, query()).choice == "acme-c:c,acme-c:c"
    chosen = select_attention(host, query(), measured=found)
    assert chosen.choice == "acme-b:b,acme-a:a"
    rows = {(row.name, row.phase): row for row in chosen.table}
    assert (rows["b", "decode"].rank, rows["b", "decode"].reason) == (50, "a has rank 100")
    assert rows["c", "decode"].rank == 900
    assert "does not have it at 16/8x128 heads, page size 16: below all that it has" in (
        rows["c", "decode"].source
    )
    # b was never faster than a; nobody knows about c.
    assert [one.name for one in chosen.others] == ["acme-c:c"]


def test_a_phase_that_was_not_measured_keeps_its_ranks(host, measured):
    found = measured([cell(SMALL, A, 10.0)])
    rows = {(one.name, one.phase): one for one in explain_attention(host, query(), found)}
    assert rows["c", "prefill"].outcome == "chosen"
    assert rows["b", "prefill"].source.endswith("h200.json has no prefill; a guess")
    assert rows["a", "decode"].outcome == "chosen"


def test_what_was_wrong_is_refused_unless_it_is_named(host, measured, caplog):
    found = measured([cell(SMALL, A, 10.0), cell(SMALL, B, 1.0, "wrong")])
    rows = {(one.name, one.phase): one for one in explain_attention(host, query(), found)}
    assert rows["b", "decode"].outcome == "refused"
    assert "computed something wrong in" in rows["b", "decode"].reason
    assert select_attention(host, query(), "b", measured=found).decode.name == "b"
    (warning,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert warning.startswith("attention.backend (decode)='b' runs because it was named, but it c")


def test_the_nearest_entry_of_a_table_of_ranks_counts():
    table = RankTable(
        source="x", prefill={(16, 2): 1, (16, 8): 2, (128, 2): 3}, decode={(16, 2): 4}
    )
    assert table.prefill_rank(16, 16, 8) == 1
    assert table.prefill_rank(8, 3, 3) == 1
    assert table.prefill_rank(16, 40, 8) == 2, "5 is nearer to 8 than to 2, by doublings"
    assert table.prefill_rank(256, 32, 8) == 3
    assert table.decode_rank(256, 64, 8) == 4
