"""Requests with different cache salts share no page, whatever else happens."""

from hypothesis import given
from hypothesis import strategies as st

from support.fake_engine import generate
from support.scheduling import Harness


@given(
    page_size=st.sampled_from([1, 2, 4]),
    asks=st.lists(
        st.tuples(st.sampled_from([None, "a", "b"]), st.integers(0, 2), st.integers(1, 12)),
        min_size=2,
        max_size=8,
    ),
    order=st.sampled_from(["fcfs", "longest-prefix"]),
    extra_pages=st.integers(0, 60),
)
def test_tenants_share_no_page_and_get_their_tokens(
    page_size: int, asks: list[tuple[str | None, int, int]], order: str, extra_pages: int
) -> None:
    """Catches: a salt lost at an insert, at a match, or on the way back from a retraction."""
    harness = Harness(
        page_size=page_size,
        num_pages=-(-36 // page_size) + extra_pages,
        rows=3,
        budget=9,
        order=order,  # type: ignore[arg-type]
    )
    table = harness.scheduler.table
    prompts = {}
    for uid, (salt, gap, length) in enumerate(asks):
        prompts[uid] = [2, 3, 4, 5, 6, 7] * 2 + [8] * length
        harness.submit(uid, prompts[uid], salt=salt, max_tokens=8, min_tokens=8)
        for _ in range(gap):
            harness.step()
            owners: dict[int, str | None] = {}
            for owner in table.requests:
                if owner is None:
                    continue
                for page in table.pages[owner.row, : table.num_pages[owner.row]].tolist():
                    assert owners.setdefault(page, owner.cache_salt) == owner.cache_salt
    harness.finish()
    for uid, prompt in prompts.items():
        assert harness.clients[uid].tokens == generate(prompt, 8, min_tokens=8)


def test_what_one_tenant_computed_is_cached_for_that_tenant_only() -> None:
    harness = Harness(page_size=2)
    prompt = [2, 3, 4, 5] * 3
    cached = {}
    for uid, salt in enumerate(["a", "a", "b", None, "b", None]):
        harness.submit(uid, prompt, salt=salt, max_tokens=1)
        harness.finish()
        cached[uid] = harness.clients[uid].num_cached
    assert list(cached.values()) == [0, 10, 0, 0, 10, 10]


def test_endless_tenants_leave_no_tree_behind() -> None:
    harness = Harness(page_size=2, num_pages=30)
    for uid in range(200):
        harness.submit(uid, [2, 3, 4, 5] * 3, salt=f"tenant {uid}", max_tokens=1)
        harness.finish()
    cache = harness.scheduler.cache.prefix_cache
    assert cache.num_salts <= 5  # type: ignore[attr-defined]
