"""The signatures of the fused operations that layers call, and the table that holds them.

A table is built once at start-up: the torch reference of every entry, replaced where a plugin or
a Triton kernel offers a better one for the device. Layers get the table in their constructor and
call its entries directly: nothing is looked up per call.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from minisgl.kernel import controls, masks, reference, rows, sampling
from minisgl.kernel.controls import ControlTensors, TokenLogprobs
from minisgl.kernel.rotation import Rotation
from minisgl.kernel.rows import DecodeInputs, RowTensors


class RmsNorm(Protocol):
    """``x / rms(x) * weight`` over the last dimension, computed in float32."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return the normed ``x``."""
        ...


class AddRmsNorm(Protocol):
    """Return ``(norm(x + residual), x + residual)``; may write into its inputs."""

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normed sum and the sum, ``[T, n]`` both.

        Args:
            x: ``[T, n]``, or parts ``[S, T, n]`` from ``linear_parts``, which are added first.
            residual: ``[T, n]``.
            weight: ``[n]``.
            eps: added to the mean square.
        """
        ...


class GatedActivation(Protocol):
    """``act(x[..., :n]) * x[..., n:]`` for ``x`` of width ``2n``."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[..., n]``."""
        ...


class Rope(Protocol):
    """Rotate the q and k heads of one layer; returns ``(q, k)``.

    ``qk`` is ``[T, q_heads + kv_heads, d]``, q heads first, and may be a view of the projection's
    output with a longer row stride; an implementation may write into it. ``rotation`` is this
    launch's: see ``Rotation``. With a rotary dim below ``d`` the rest of each head passes
    unchanged. Optional q/k RMSNorm weights ``[d]`` are applied to each head before the rotation.
    """

    def __call__(
        self,
        qk: torch.Tensor,
        num_q_heads: int,
        rotation: Rotation,
        *,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        norm_eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rotated q ``[T, q_heads, d]`` and k ``[T, kv_heads, d]``."""
        ...


class Linear(Protocol):
    """``x @ weight.T + bias`` for ``x`` ``[T, in]`` and ``weight`` ``[out, in]`` of any strides."""

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return ``[T, out]``."""
        ...


class LinearParts(Protocol):
    """The same product as parts that somebody else adds up: a norm that reads them anyway.

    With few rows one product has too few tiles for a large GPU. Cut along the inputs it has more,
    and nobody waits for their sum (split-K, as in Stream-K, Osama et al., 2023).
    """

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return parts ``[S, T, out]``, S at least 1, whose sum in float32 is the product.

        They have ``x``'s dtype, or float32 where they are several.
        """
        ...


class AddNormLinear(Protocol):
    """``linear(norm(x + residual))``, and the sum: the beginning of every half of a layer.

    Equal to ``add_rms_norm`` followed by ``linear``.
    """

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor,
        eps: float,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the product ``[T, out]`` and the sum ``[T, in]``; may write into its inputs.

        Args:
            x: ``[T, in]``, or parts ``[S, T, in]`` from ``linear_parts``.
            residual: ``[T, in]``; ``None`` before the first layer: the sum is ``x`` then.
            norm_weight: ``[in]``.
            eps: of the norm.
            weight: ``[out, in]``.
            bias: ``[out]`` or ``None``.
        """
        ...


class AddNormGated(Protocol):
    """``act(gate) * up`` of ``gate, up = linear(norm(x + residual))``, and the sum.

    Equal to ``add_norm_linear`` followed by ``silu_and_mul``, or ``gelu_and_mul``.
    """

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor,
        eps: float,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        gelu: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``[T, out / 2]`` and the sum ``[T, in]``; see ``AddNormLinear``.

        Args:
            x: as there.
            residual: as there.
            norm_weight: as there.
            eps: as there.
            weight: ``[out, in]``, the gate's half first.
            bias: as there.
            gelu: GeGLU with the tanh approximation instead of SwiGLU.
        """
        ...


class StoreKV(Protocol):
    """Write K and V of a launch to their slots of one layer."""

    def __call__(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        slots: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
    ) -> None:
        """Store ``k`` and ``v`` ``[T, kv_heads, d]`` (last dimension contiguous).

        Args:
            k: keys.
            v: values.
            slots: int64 ``[T]``; -1 stores nothing.
            k_pool: keys of the layer, ``[slots, kv_heads, d]``.
            v_pool: values of the layer, the same shape.
        """
        ...


class RopeStore(Protocol):
    """q/k norms, rotation and the store of K and V of one layer, in one kernel.

    Equal to ``rope`` followed by ``store_kv``; layers use it where the pool is plain tensors.
    """

    def __call__(
        self,
        qkv: torch.Tensor,
        num_q_heads: int,
        num_kv_heads: int,
        rotation: Rotation,
        slots: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        *,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        norm_eps: float,
    ) -> torch.Tensor:
        """Return the rotated q ``[T, q_heads, d]``, contiguous.

        Args:
            qkv: ``[T, q_heads + 2 * kv_heads, d]``: q, k, v heads; the projection's output.
            num_q_heads: of this rank.
            num_kv_heads: of this rank.
            rotation: of the launch.
            slots: int64 ``[T]``; -1 stores nothing.
            k_pool: keys of the layer, ``[slots, kv_heads, d]``.
            v_pool: values of the layer, the same shape.
            q_norm: RMSNorm weight ``[d]`` of every q head, or ``None``.
            k_norm: the same of every k head.
            norm_eps: of both norms.
        """
        ...


class PageIndices(Protocol):
    """Flatten the pages of a launch's rows: the index lists that paged kernels read."""

    def __call__(
        self,
        page_table: torch.Tensor,
        rows: torch.Tensor,
        kv_lens: torch.Tensor,
        page_size: int,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_lens: torch.Tensor,
    ) -> None:
        """Fill the last three tensors; never synchronises, allocates nothing that must stay.

        Args:
            page_table: int32 ``[table rows, width]``.
            rows: int64 ``[R]``: rows of the table.
            kv_lens: int32 ``[R]``: tokens of each, at least 1.
            page_size: tokens a page.
            indptr: int32 ``[R + 1]``: filled with 0 and the running sum of the rows' pages.
            indices: int32, large enough: row ``r`` gets its pages at ``indptr[r]``.
            last_page_lens: int32 ``[R]``: filled with the tokens in each row's last page, 1 to
                ``page_size``.
        """
        ...


class ApplyPlan(Protocol):
    """Write what a packed plan changes in the state of the rows: see ``minisgl.kernel.rows``."""

    def __call__(self, words: torch.Tensor, rows: RowTensors) -> None:
        """Apply the plan in ``words``, int32; on a GPU without reading it on the host."""
        ...


class AdvanceRows(Protocol):
    """From the state of the decode rows to the model's inputs: see ``minisgl.kernel.rows``."""

    def __call__(self, rows: RowTensors, inputs: DecodeInputs, page_size: int) -> None:
        """Fill ``inputs`` for the first rows of the order, and advance their lengths."""
        ...


class SampleGumbel(Protocol):
    """Greedy rows take the argmax, others draw by Gumbel-max with keyed noise."""

    def __call__(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        seed: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Return int64 ``[S]``: one token of each row of ``logits`` ``[S, vocab]``, any dtype.

        A greedy row's token is the lowest id among the largest logits. The noise of a token is a
        function of (seed, position, id) alone: see ``minisgl.kernel.sampling``.

        Args:
            logits: left as they are.
            temperature: float32 ``[S]``; 0 is greedy.
            seed: int64 ``[S]``.
            positions: int64 ``[S]``: place of the token to come in its sequence.
        """
        ...


class SampleFiltered(Protocol):
    """The same among the tokens that pass top-k, then top-p, then min-p."""

    def __call__(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        seed: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Return int64 ``[S]``; a greedy row ignores the filters.

        Args:
            logits: ``[S, vocab]``, left as they are.
            temperature: float32 ``[S]``; 0 is greedy.
            top_k: int64 ``[S]``; 0 is all.
            top_p: float32 ``[S]``; 1 is all.
            min_p: float32 ``[S]``; 0 is all.
            seed: int64 ``[S]``.
            positions: int64 ``[S]``.
        """
        ...


class MaskLogits(Protocol):
    """Only the allowed tokens of a row are possible."""

    def __call__(self, logits: torch.Tensor, rows: torch.Tensor, state: ControlTensors) -> None:
        """Set the logits of all other tokens to -inf.

        Args:
            logits: float32 ``[S, vocab]``, changed.
            rows: int64 ``[S]``.
            state: of all rows.
        """
        ...


class BiasLogits(Protocol):
    """Biases, and bans of single tokens, which may end at a length of the row."""

    def __call__(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        state: ControlTensors,
        num_entries: int,
    ) -> None:
        """Add the entries that count.

        Args:
            logits: float32 ``[S, vocab]``, changed.
            rows: int64 ``[S]``.
            lengths: int64 ``[S]``: tokens of each row.
            state: of all rows.
            num_entries: no row has more.
        """
        ...


class BanSequences(Protocol):
    """The last token of a banned sequence is impossible where the others have just come."""

    def __call__(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        state: ControlTensors,
        num_sequences: int,
        length: int,
    ) -> None:
        """Set the logits of those tokens to -inf.

        Args:
            logits: float32 ``[S, vocab]``, changed.
            rows: int64 ``[S]``.
            state: of all rows.
            num_sequences: no row has more.
            length: no sequence has more tokens before its last one; at least 1.
        """
        ...


class Penalize(Protocol):
    """Repetition penalty (CTRL), then frequency and presence penalty (OpenAI)."""

    def __call__(self, logits: torch.Tensor, rows: torch.Tensor, state: ControlTensors) -> None:
        """Divide positive and multiply negative logits of tokens that are there; then subtract.

        Args:
            logits: float32 ``[S, vocab]``, changed.
            rows: int64 ``[S]``.
            state: of all rows.
        """
        ...


class TokenLogprobsOp(Protocol):
    """Log-probabilities of tokens, their ranks, and the likeliest alternatives."""

    def __call__(self, logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> TokenLogprobs:
        """Return them, finite: at least ``minisgl.kernel.controls.MIN_LOGPROB``.

        Args:
            logits: ``[S, vocab]``, any float dtype, left as they are.
            tokens: int64 ``[S]``.
            num_top: alternatives of each, from 0.
        """
        ...


class MaskTokens(Protocol):
    """Of some rows only those tokens may come that a mask from the host names."""

    def __call__(
        self, logits: torch.Tensor, places: torch.Tensor, masks: torch.Tensor, which: torch.Tensor
    ) -> None:
        """Set the logits of all other tokens of those rows to -inf.

        Args:
            logits: ``[S, vocab]``, any float dtype, changed.
            places: int64 ``[k]``: rows of ``logits``, each once.
            masks: int32 ``[m, ceil(vocab / 32)]``: a bit a token, from the lowest of a word.
            which: int64 ``[k]``: the mask of each of those rows.
        """
        ...


def compose_rope_store(rope: Rope, store_kv: StoreKV) -> RopeStore:
    """Return ``rope_store`` in two steps: its reference, and where only these have a fast form."""

    def rope_store(
        qkv: torch.Tensor,
        num_q_heads: int,
        num_kv_heads: int,
        rotation: Rotation,
        slots: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        *,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        norm_eps: float,
    ) -> torch.Tensor:
        num_qk_heads = num_q_heads + num_kv_heads
        q, k = rope(
            qkv[:, :num_qk_heads],
            num_q_heads,
            rotation,
            q_norm=q_norm,
            k_norm=k_norm,
            norm_eps=norm_eps,
        )
        store_kv(k, qkv[:, num_qk_heads:], slots, k_pool, v_pool)
        return q.contiguous()

    return rope_store


def compose_linear_parts(linear: Linear) -> LinearParts:
    """Return ``linear_parts`` with a single part."""

    def linear_parts(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return linear(x, weight, bias).unsqueeze(0)

    return linear_parts


def add_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    rms_norm: RmsNorm,
    add_rms_norm: AddRmsNorm,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of ``x + residual`` and the sum; see ``AddNormLinear`` for what they are."""
    if residual is not None:
        return add_rms_norm(x, residual, weight, eps)
    total = x if x.dim() == 2 else x.sum(0, dtype=torch.float32).to(weight.dtype)
    return rms_norm(total, weight, eps), total


def compose_add_norm_linear(
    rms_norm: RmsNorm, add_rms_norm: AddRmsNorm, linear: Linear
) -> AddNormLinear:
    """Return ``add_norm_linear`` in two steps."""

    def add_norm_linear(
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor,
        eps: float,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, total = add_norm(x, residual, norm_weight, eps, rms_norm, add_rms_norm)
        return linear(normed, weight, bias), total

    return add_norm_linear


def compose_add_norm_gated(
    add_norm_linear: AddNormLinear, silu_and_mul: GatedActivation, gelu_and_mul: GatedActivation
) -> AddNormGated:
    """Return ``add_norm_gated`` in two steps."""

    def add_norm_gated(
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor,
        eps: float,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        gelu: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, total = add_norm_linear(x, residual, norm_weight, eps, weight, bias)
        return (gelu_and_mul if gelu else silu_and_mul)(out), total

    return add_norm_gated


_rope_store = compose_rope_store(reference.rope, reference.store_kv)
_linear_parts = compose_linear_parts(reference.linear)
_add_norm_linear = compose_add_norm_linear(
    reference.rms_norm, reference.add_rms_norm, reference.linear
)
_add_norm_gated = compose_add_norm_gated(
    _add_norm_linear, reference.silu_and_mul, reference.gelu_and_mul
)


@dataclass(frozen=True, slots=True)
class OpTable:
    """One implementation of each operation."""

    rms_norm: RmsNorm = reference.rms_norm
    add_rms_norm: AddRmsNorm = reference.add_rms_norm
    silu_and_mul: GatedActivation = reference.silu_and_mul
    gelu_and_mul: GatedActivation = reference.gelu_and_mul
    rope: Rope = reference.rope
    linear: Linear = reference.linear
    linear_parts: LinearParts = _linear_parts
    add_norm_linear: AddNormLinear = _add_norm_linear
    add_norm_gated: AddNormGated = _add_norm_gated
    store_kv: StoreKV = reference.store_kv
    rope_store: RopeStore = _rope_store
    page_indices: PageIndices = reference.page_indices
    apply_plan: ApplyPlan = rows.apply_plan
    advance_rows: AdvanceRows = rows.advance_rows
    sample_gumbel: SampleGumbel = sampling.sample_gumbel
    sample_filtered: SampleFiltered = sampling.sample_filtered
    mask_logits: MaskLogits = controls.mask_logits
    bias_logits: BiasLogits = controls.bias_logits
    ban_sequences: BanSequences = controls.ban_sequences
    penalize: Penalize = controls.penalize
    token_logprobs: TokenLogprobsOp = controls.token_logprobs
    mask_tokens: MaskTokens = masks.mask_tokens


def build_table(chosen: Mapping[str, Any]) -> OpTable:
    """Return the table of some implementations by their entries' names.

    Entries that are several operations in one, and that nobody has a fast form of, are composed of
    the table's own: so a fast form of a part counts there too.
    """
    parts = OpTable(**chosen)
    composed: dict[str, Any] = {
        "rope_store": compose_rope_store(parts.rope, parts.store_kv),
        "linear_parts": compose_linear_parts(parts.linear),
        "add_norm_linear": compose_add_norm_linear(
            parts.rms_norm, parts.add_rms_norm, parts.linear
        ),
    }
    composed.update(chosen)
    composed.setdefault(
        "add_norm_gated",
        compose_add_norm_gated(composed["add_norm_linear"], parts.silu_and_mul, parts.gelu_and_mul),
    )
    return OpTable(**composed)
