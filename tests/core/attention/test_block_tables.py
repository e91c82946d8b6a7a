"""Block tables: whose pages they hold, how wide they are, and which launches share one."""

import torch

from minisgl.attention import BlockTables
from minisgl.testing.paged_rows import PagedRows


def make(max_rows: int = 4) -> tuple[PagedRows, BlockTables]:
    rows = PagedRows(
        [40, 1, 16, 100], page_size=16, num_q_heads=2, num_kv_heads=1, head_dim=8, max_rows=max_rows
    )
    return rows, BlockTables(rows.context)


def test_a_launch_s_table_has_its_rows_pages_and_no_more_columns_than_it_needs():
    rows, tables = make()
    table = tables.of(rows.batch([2, 0], [16, 33]))
    assert table.tolist() == rows.page_table[[2, 0], :3].tolist()
    assert table.dtype == torch.int32
    assert table.is_contiguous()
    assert tables.of(rows.batch([3], [16])).shape == (1, 1)
    assert tables.of(rows.batch([3], [17])).shape == (1, 2)


def test_launches_that_are_not_recorded_share_nothing():
    rows, tables = make()
    first = tables.of(rows.batch([3], [100]))
    kept = first.clone()
    tables.of(rows.batch([0], [40]))
    assert torch.equal(first, kept)


def test_a_graph_s_table_is_as_wide_as_the_page_table_and_written_by_every_replay():
    rows, tables = make()
    batch = rows.batch([rows.padding_row] * 2, [1, 1])
    table = tables.for_graph(batch)
    assert table.shape == (2, rows.page_table.shape[1])
    for order in ([3, 0], [1, 2]):
        batch.rows.copy_(torch.tensor(order))
        tables.gather(batch, table)
        assert table.tolist() == rows.page_table[order].tolist()


def test_graphs_of_all_sizes_share_one_table():
    rows, tables = make()
    sizes = [tables.for_graph(rows.batch([0] * size, [1] * size)) for size in (4, 1, 3)]
    assert len({table.data_ptr() for table in sizes}) == 1
    assert [len(table) for table in sizes] == [4, 1, 3]


def test_more_rows_than_announced_get_a_table_that_holds_them():
    rows, tables = make()
    table = tables.for_graph(rows.batch([0] * 9, [1] * 9))
    assert table.shape[0] == 9


def test_a_page_table_of_another_width_gets_a_table_of_its_own():
    """As when backends are timed before graphs are recorded, on rows of fewer pages."""
    rows, tables = make()
    narrow, wide = rows.batch([0, 1], [1, 1]), rows.batch([0, 1], [1, 1])
    narrow.page_table = rows.page_table[:, :2].contiguous()
    first = tables.for_graph(narrow)
    second = tables.for_graph(wide)
    assert first.shape == (2, 2)
    assert second.shape == (2, rows.page_table.shape[1])
    tables.gather(wide, second)
    tables.gather(narrow, first)
    assert second.tolist() == rows.page_table[[0, 1]].tolist()
    assert first.tolist() == rows.page_table[[0, 1], :2].tolist()
    assert tables.for_graph(wide).data_ptr() == second.data_ptr()
