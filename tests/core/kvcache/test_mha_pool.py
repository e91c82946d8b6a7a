"""The KV pool: layout, dummy page, store."""

import pytest
import torch

from minisgl.errors import DoesNotFitError
from minisgl.kvcache.interface import KVPoolSpec
from minisgl.kvcache.mha_pool import MHAKVCachePool


def spec(**changes: object) -> KVPoolSpec:
    values = {
        "num_layers": 2,
        "num_kv_heads": 3,
        "head_dim": 4,
        "page_size": 5,
        "dtype": torch.float32,
        "device": torch.device("cpu"),
    }
    return KVPoolSpec(**{**values, **changes})  # type: ignore[arg-type]


def test_stored_tokens_are_found_at_their_page_and_offset() -> None:
    pool = MHAKVCachePool(spec())
    pool.allocate(7)
    k, v = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    pool.store(k, v, torch.tensor([2 * 5 + 1, 6 * 5 + 4]), layer=1)
    stored_k, stored_v = pool.layer(1)
    assert stored_k.shape == (7, 5, 3, 4)
    torch.testing.assert_close(stored_k[2, 1], k[0])
    torch.testing.assert_close(stored_v[6, 4], v[1])
    assert stored_k.count_nonzero() == k.numel(), "nothing else is written; new pages are zero"
    assert pool.layer(0)[0].count_nonzero() == 0


def test_padded_tokens_touch_only_the_dummy_page() -> None:
    pool = MHAKVCachePool(spec())
    pool.allocate(3)
    pool.store(torch.ones(2, 3, 4), torch.ones(2, 3, 4), torch.tensor([-1, 5]), layer=0)
    k, _ = pool.layer(0)
    assert k[1, 0].eq(1).all()
    assert k[1, 1:].eq(0).all()
    assert k[2].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_per_page_counts_k_and_v_of_all_layers(dtype: torch.dtype) -> None:
    one = spec(dtype=dtype)
    pool = MHAKVCachePool(one)
    pool.allocate(3)
    k, v = pool.layer(0)
    assert MHAKVCachePool.bytes_per_page(one) * 3 == 2 * (k.nbytes + v.nbytes)


def test_a_pool_that_does_not_fit_names_the_setting() -> None:
    with pytest.raises(DoesNotFitError, match=r"lower cache\.num_pages"):
        MHAKVCachePool(spec()).allocate(2**48)
