"""What probes are asked."""

from dataclasses import replace

from minisgl.plugins.query import query_of_context
from minisgl.testing.paged_rows import PagedRows
from support.kernel_site import query


def test_a_context_is_asked_about_as_a_query():
    rows = PagedRows([40], page_size=16, num_q_heads=16, num_kv_heads=8, head_dim=128)
    expected = query(device="cpu", dtype="float32", kv_dtype="float32")
    assert query_of_context(rows.context, (9, 0)) == expected
    windows = replace(rows.context, sliding_window=True, logit_soft_cap=True)
    assert query_of_context(windows, None) == replace(
        expected, compute_capability=None, sliding_window=True, logit_soft_cap=True
    )
