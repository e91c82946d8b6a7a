"""xqa and trtllm-gen without a GPU: their arguments in order, and attention in torch."""

from typing import Any

import torch

# csrc/xqa/xqa_wrapper.cu of FlashInfer 0.6.12: xqa_wrapper.
XQA = (
    *("run_sm90_fp8_mha", "sm_count", "num_kv_heads", "sliding_win_size", "q_scale"),
    *("q_scale_tensor", "output", "rcp_out_scale", "q", "sinks", "k_cache", "v_cache"),
    *("k_sf_cache", "v_sf_cache", "page_table", "max_seq_len", "seq_lens", "batch_size"),
    *("kv_scale", "kv_scale_tensor", "q_seq_len", "mask", "semaphores", "scratch", "enable_pdl"),
)

# csrc/trtllm_fmha_kernel_launcher.cu: trtllm_paged_attention_decode.
GEN = (
    *("out", "out_scale_factor", "query", "key_cache", "value_cache", "workspace_buffer"),
    *("block_tables", "seq_lens", "max_q_len", "max_kv_len", "bmm1_scale", "bmm2_scale"),
    *("o_sf_scale", "o_sf_vec_size", "o_sf_start_index", "batch_size", "window_left"),
    *("sparse_mla_top_k", "sm_count", "enable_pdl", "workspace_size", "attention_sinks"),
    *("cum_seq_lens_q", "key_block_scales", "value_block_scales"),
    *("skip_softmax_threshold_scale_factor", "uses_shared_paged_kv_idx", "lse"),
    *("lse_stride_tokens", "lse_stride_heads"),
)


class FakeXqa:
    """``xqa_wrapper``: one query a row, K and V as NHD."""

    def __init__(self) -> None:
        self.workspaces: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.batch_sizes: list[int] = []

    def __call__(self, *arguments: Any) -> None:
        given = dict(zip(XQA, arguments, strict=True))
        q, k, page_table = given["q"], given["k_cache"], given["page_table"]
        rows = given["batch_size"]
        self.batch_sizes.append(rows)
        self.workspaces.append((given["semaphores"], given["scratch"]))
        assert (given["sliding_win_size"], given["q_seq_len"]) == (0, 1)
        assert given["kv_scale"] == given["rcp_out_scale"] == 1.0
        assert given["sm_count"] == 132
        assert q.is_contiguous(), "the kernel takes no strides of q"
        assert given["output"].is_contiguous()
        assert k.shape[2] == given["num_kv_heads"]
        assert given["max_seq_len"] == page_table.shape[1] * k.shape[1]
        assert given["semaphores"].numel() >= rows * given["num_kv_heads"]
        assert given["scratch"].numel() >= 132 * 2 * q[0].numel() // k.shape[2]
        scale = given["q_scale"] / q.shape[-1] ** 0.5
        _decode(q, k, given["v_cache"], given["output"], page_table, given["seq_lens"], rows, scale)


class FakeGen:
    """``trtllm_paged_attention_decode``: K and V as HND, by their strides."""

    def __init__(self) -> None:
        self.workspaces: list[tuple[torch.Tensor, ...]] = []

    def __call__(self, *arguments: Any) -> None:
        given = dict(zip(GEN, arguments, strict=True))
        k, v = (given[name].transpose(-3, -2) for name in ("key_cache", "value_cache"))
        self.workspaces.append((given["workspace_buffer"],))
        assert given["workspace_size"] == given["workspace_buffer"].numel() > 8 * 2**20
        assert (given["max_q_len"], given["window_left"], given["bmm2_scale"]) == (1, -1, 1.0)
        assert given["max_kv_len"] == given["block_tables"].shape[1] * k.shape[1]
        assert given["uses_shared_paged_kv_idx"] is True
        _decode(
            given["query"],
            k,
            v,
            given["out"],
            given["block_tables"],
            given["seq_lens"],
            given["batch_size"],
            given["bmm1_scale"],
        )


def _decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    pages: torch.Tensor,
    kv_lens: torch.Tensor,
    rows: int,
    scale: float,
) -> None:
    assert len(q) == len(out) == len(pages) == len(kv_lens) == rows
    for ints in (pages, kv_lens):
        assert ints.dtype == torch.int32
        assert ints.is_contiguous()
    for row in range(rows):
        own = pages[row, : -(-int(kv_lens[row]) // k.shape[1])].long()
        keys, values = (part[own].flatten(0, 1)[: int(kv_lens[row])] for part in (k, v))
        group = q.shape[1] // k.shape[2]
        keys, values = (part.repeat_interleave(group, dim=1) for part in (keys, values))
        weights = (torch.einsum("hd,khd->hk", q[row], keys) * scale).softmax(dim=-1)
        out[row] = torch.einsum("hk,khd->hd", weights, values)
