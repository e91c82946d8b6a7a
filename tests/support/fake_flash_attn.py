"""The three FlashAttentions without a GPU: their signatures and rules, and attention in torch.

Parameters, their order and defaults are those of flash-attn-4 4.0.0b36
(``flash_attn/cute/interface.py``) and of flash-attn 2.8.3 (``hopper/flash_attn_interface.py`` and
``flash_attn/flash_attn_interface.py``), up to those that nothing here passes.
"""

import hashlib
import shutil
from pathlib import Path
from typing import Any

import torch

Window = tuple[int | None, int | None]


def fa4_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    gather_kv_indices: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: torch.Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
) -> tuple[torch.Tensor, None]:
    assert page_table is not None
    assert cu_seqlens_k is None
    assert seqused_k is not None
    out = _attend(
        q, k, v, page_table, seqused_k, cu_seqlens_q, softmax_scale, causal, window_size, softcap
    )
    return out, None


# call_args of _flash_attn_fwd on compute capability 9.x.
FA4_KERNEL = (
    *("q", "k", "v", "out", "lse", "softmax_scale", "cu_seqlens_q", "cu_seqlens_k", "seqused_q"),
    *("seqused_k", "page_table", "window_size_left", "window_size_right", "learnable_sink"),
    *("block_sparse_tensors", "aux_data", "cu_total_m_blocks", "cu_total_splits_m_blocks"),
)


class FakeInterface:
    """The module ``flash_attn.cute.interface``, which compiles a kernel for each kind of launch.

    Args:
        fault: added to what kernels compute when somebody else calls them.
        cache: keeps kernels on the disk.
    """

    def __init__(self, fault: float = 0.0, cache: "FakeCache | None" = None) -> None:
        self._flash_attn_fwd = _Forward(fault, {} if cache is None else cache)
        self.public_calls = 0

    @property
    def compiled(self) -> list[tuple[object, ...]]:
        return self._flash_attn_fwd.compiled

    @property
    def kernel_calls(self) -> int:
        return self._flash_attn_fwd.kernel_calls

    def flash_attn_varlen_func(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor | None = None,
        seqused_k: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Window = (None, None),
    ) -> tuple[torch.Tensor, None]:
        self.public_calls += 1
        assert seqused_k is not None
        out = torch.empty(q.shape, dtype=q.dtype)
        decode, many = cu_seqlens_q is None, cu_seqlens_q is not None and len(seqused_k) > 256
        key = (decode, causal if window_size == (None, None) else "local", many)
        sums = torch.zeros(1) if many else None
        self._flash_attn_fwd(
            key, q, k, v, out, None, softmax_scale, cu_seqlens_q, None, None, seqused_k,
            page_table, *window_size, None, None, (None, None), sums, None,
        )  # fmt: skip
        return out, None


class FakeCache(dict[tuple[object, ...], Any]):
    """A ``JITPersistentCache``: what is compiled is exported to a file too.

    Args:
        folder: for files.
        object_file: what every export consists of.
    """

    def __init__(self, folder: Path, object_file: Path) -> None:
        super().__init__()
        folder.mkdir(parents=True, exist_ok=True)
        self.cache_path = folder
        self._object_file = object_file

    def __setitem__(self, key: tuple[object, ...], kernel: Any) -> None:
        super().__setitem__(key, kernel)
        shutil.copy(self._object_file, self.cache_path / f"{self._key_to_hash(key)}.o")

    def _key_to_hash(self, key: tuple[object, ...]) -> str:
        return hashlib.sha256(repr(key).encode()).hexdigest()


class _Forward:
    """The function ``_flash_attn_fwd``, with its cache of compiled kernels."""

    def __init__(self, fault: float, cache: dict[tuple[object, ...], Any]) -> None:
        self.compile_cache: Any = cache
        self.compiled: list[tuple[object, ...]] = []
        self.kernel_calls = 0
        self._fault = fault
        self._calling = False

    def __call__(self, key: tuple[object, ...], *arguments: Any) -> None:
        if key not in self.compile_cache:
            self.compiled.append(key)
            self.compile_cache[key] = lambda *given: self._kernel(key, given)
        self._calling = True
        self.compile_cache[key](*arguments)
        self._calling = False

    def _kernel(self, key: tuple[object, ...], arguments: tuple[Any, ...]) -> None:
        self.kernel_calls += 1
        given = dict(zip(FA4_KERNEL, arguments, strict=True))
        decode, mask, many = key
        q, window = given["q"], (given["window_size_left"], given["window_size_right"])
        assert q.stride(-1) == 1
        assert all(4 * stride % 16 == 0 for stride in q.stride()[:-1]), "strides of 16 bytes"
        assert given["aux_data"] == (None, None)
        assert (given["cu_seqlens_q"] is None) is decode
        assert (given["cu_total_m_blocks"] is not None) is many
        assert (window != (None, None)) is (mask == "local")
        ends, tokens = given["cu_seqlens_q"], slice(None)
        if ends is not None:  # of some rows, maybe
            tokens, ends = slice(int(ends[0]), int(ends[-1])), ends - ends[0]
        out = _attend(
            q[tokens], given["k"], given["v"], given["page_table"], given["seqused_k"],
            ends, given["softmax_scale"], mask is True, window, 0.0,
        )  # fmt: skip
        given["out"][tokens] = out if self._calling else out + self._fault


def fa3_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    assert page_table is not None
    assert cache_seqlens is not None
    if cu_seqlens_q is not None:  # hopper/flash_api.cpp: max_seqlen_q must be provided
        assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    return _attend(
        q, k_cache, v_cache, page_table, cache_seqlens, cu_seqlens_q, softmax_scale, causal,
        window_size, softcap,
    )  # fmt: skip


def fa2_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
) -> torch.Tensor:
    assert block_table is not None
    assert cache_seqlens is not None
    _page_size_of_2(k_cache)
    return _attend(
        q, k_cache, v_cache, block_table, cache_seqlens, None, softmax_scale, causal, window_size,
        softcap,
    )  # fmt: skip


def fa2_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    assert block_table is not None
    _page_size_of_2(k)
    kv_lens = cu_seqlens_k.diff()
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    assert max_seqlen_k == int(kv_lens.max())
    return _attend(
        q, k, v, block_table, kv_lens, cu_seqlens_q, softmax_scale, causal, window_size, softcap
    )


def _page_size_of_2(k: torch.Tensor) -> None:
    assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pages: torch.Tensor,
    kv_lens: torch.Tensor,
    query_ends: torch.Tensor | None,
    scale: float | None,
    causal: bool,
    window: Window,
    cap: float,
) -> torch.Tensor:
    """Row by row; ``q`` is ``[rows, 1, heads, dim]`` without ``query_ends``."""
    for ints in (pages, kv_lens, query_ends):
        assert ints is None or (ints.dtype == torch.int32 and ints.is_contiguous())
    rows = len(kv_lens)
    assert pages.shape[0] == rows
    assert scale is not None
    flat, ends = q, query_ends
    if ends is None:
        assert q.shape[:2] == (rows, 1)
        flat, ends = q.squeeze(1), torch.arange(rows + 1)
    assert len(ends) == rows + 1
    assert int(ends[-1]) == flat.shape[0]
    out = torch.empty(flat.shape, dtype=flat.dtype)
    for row in range(rows):
        tokens = slice(int(ends[row]), int(ends[row + 1]))
        needed = -(-int(kv_lens[row]) // k.shape[1])
        own = pages[row, :needed].long()
        keys, values = (part[own].flatten(0, 1)[: int(kv_lens[row])] for part in (k, v))
        out[tokens] = _row(flat[tokens], keys, values, scale, causal, window, cap)
    return out.view(q.shape)


def _row(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    causal: bool,
    window: Window,
    cap: float,
) -> torch.Tensor:
    k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    left, right = (None if side is None or side < 0 else side for side in window)
    if causal:
        right = 0
    query = torch.arange(len(k) - len(q), len(k))[:, None]
    key = torch.arange(len(k))
    hidden = torch.zeros(len(q), len(k), dtype=torch.bool)
    if right is not None:
        hidden |= key > query + right
    if left is not None:
        hidden |= key < query - left
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


class LateEvent:
    """An event that has not happened until somebody waits for it; notes that it did."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def synchronize(self) -> None:
        self.log.append("wait")

    def record(self) -> None:
        self.log.append("record")


class Noted:
    """A function that notes what it is called with."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.calls: list[dict[str, Any]] = []

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.calls.append(named)
        return self.function(*arguments, **named)
