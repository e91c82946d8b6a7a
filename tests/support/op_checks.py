"""Checks of implementations of the op table against references in higher precision.

Each check makes fresh random inputs, runs an implementation on poisoned memory, and compares by
relative norm. They serve Triton's interpreter on a CPU and real kernels on a card alike; ``run``
says how an operation is called: as it is, or inside a recorded CUDA graph.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from minisgl.kernel import OpTable, Rotation, reference
from minisgl.kernel.sampling import gumbel_noise

Tensors = Sequence[torch.Tensor]
Call = Callable[..., Tensors]
Run = Callable[[Call, Callable[[int], Tensors]], tuple[Tensors, Tensors]]
"""Given a call and what makes its inputs from a seed: the inputs and the outputs."""

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def error_bound(dtype: torch.dtype, *, truncates: bool = False) -> float:
    """Return the largest relative error that roundings explain.

    Triton's interpreter truncates to bfloat16, where a device rounds.
    """
    if dtype == torch.bfloat16:
        return 1e-2 if truncates else 4e-3
    return {torch.float16: 6e-4, torch.float32: 2e-6}[dtype]


@contextmanager
def poisoned() -> Iterator[None]:
    """Let new tensors hold NaN, or the largest integer, until something is written to them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert torch.utils.deterministic.fill_uninitialized_memory
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


def run_eagerly(call: Call, make: Callable[[int], Tensors]) -> tuple[Tensors, Tensors]:
    """Call once; returns copies of the inputs, and the outputs."""
    inputs = make(1)
    kept = [tensor.clone() for tensor in inputs]
    # Interpreted kernels overflow in numpy, which warns of it.
    with poisoned(), np.errstate(all="ignore"):
        return kept, call(*inputs)


def run_recorded(call: Call, make: Callable[[int], Tensors]) -> tuple[Tensors, Tensors]:
    """Record a call in a CUDA graph, and replay it with other inputs and poisoned outputs."""
    static = make(0)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        call(*static)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            outputs = call(*static)
        for output in outputs:
            output.fill_(float("nan") if output.is_floating_point() else -99)
        inputs = make(1)
        for place, tensor in zip(static, inputs, strict=True):
            place.copy_(tensor)
        graph.replay()
        stream.synchronize()
    return inputs, outputs


@dataclass(frozen=True)
class Checks:
    """All checks of one table of operations.

    Attributes:
        ops: the table.
        device: where to run.
        run: how to call.
        truncates: whether bfloat16 is truncated to, instead of rounded.
    """

    ops: OpTable
    device: str
    run: Run = run_eagerly
    truncates: bool = False

    def close(
        self,
        out: torch.Tensor,
        exact: torch.Tensor,
        rounded: torch.Tensor,
        least_equal: float = 0.97,
    ) -> None:
        """Compare with float64, and, for where it rounds, with the reference in its own dtype."""
        assert out.shape == exact.shape == rounded.shape
        assert out.dtype == rounded.dtype
        assert out.isfinite().all(), "everything has been written"
        error = ((out.double() - exact).norm() / exact.norm()).item()
        bound = error_bound(out.dtype, truncates=self.truncates)
        assert error < bound, f"relative error {error:.2e}, allowed {bound:.0e}"
        if out.dtype == torch.float16 or (out.dtype == torch.bfloat16 and not self.truncates):
            equal = (out == rounded).double().mean().item()
            assert equal > least_equal, f"{equal:.1%} equal the reference: it rounds elsewhere"

    def randn(self, seed: int, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        return (torch.randn(*shape, generator=generator, device=self.device) * scale).to(dtype)

    def rms_norm(self, dtype: torch.dtype, shape: Sequence[int], *, row_stride: int = 0) -> None:
        """``shape`` ``[T, n]`` or ``[T, heads, n]``; ``row_stride`` pads rows."""
        width, row = shape[-1], int(np.prod(shape[1:]))

        def make(seed: int) -> Tensors:
            rows = self.randn(seed, shape[0], max(row, row_stride), dtype=dtype, scale=3)
            return rows, self.randn(seed + 7, width, dtype=dtype)

        def call(rows: torch.Tensor, weight: torch.Tensor) -> Tensors:
            return [self.ops.rms_norm(rows[:, :row].unflatten(1, shape[1:]), weight, 1e-6)]

        (rows, weight), (out,) = self.run(call, make)
        x = rows[:, :row].unflatten(1, shape[1:])
        exact = _norm64(x, weight)
        self.close(out, exact, reference.rms_norm(x, weight, 1e-6))

    def linear(
        self, dtype: torch.dtype, rows: int, outputs: int, inputs: int, *, biased: bool = False
    ) -> None:
        def make(seed: int) -> Tensors:
            x = self.randn(seed, rows, inputs + 16, dtype=dtype)
            weight = self.randn(seed + 1, outputs, inputs, dtype=dtype)
            return x, weight, self.randn(seed + 2, outputs, dtype=dtype, scale=9)

        (x, weight, bias), (out,) = self.run(
            lambda x, weight, bias: [
                self.ops.linear(x[:, :inputs], weight, bias if biased else None)
            ],
            make,
        )
        exact = x[:, :inputs].double() @ weight.double().t() + (bias.double() if biased else 0)
        error = ((out.double() - exact).norm() / exact.norm()).item()
        assert out.dtype == dtype
        assert error < error_bound(dtype, truncates=self.truncates), f"relative error {error:.2e}"

    def linear_parts(
        self, dtype: torch.dtype, rows: int, outputs: int, inputs: int, *, biased: bool = False
    ) -> int:
        """Return how many parts there are."""

        def make(seed: int) -> Tensors:
            x = self.randn(seed, rows, inputs, dtype=dtype)
            weight = self.randn(seed + 1, outputs, inputs, dtype=dtype)
            return x, weight, self.randn(seed + 2, outputs, dtype=dtype, scale=9)

        (x, weight, bias), (parts,) = self.run(
            lambda x, weight, bias: [self.ops.linear_parts(x, weight, bias if biased else None)],
            make,
        )
        exact = x.double() @ weight.double().t() + (bias.double() if biased else 0)
        error = ((parts.double().sum(0) - exact).norm() / exact.norm()).item()
        assert parts.dtype == (dtype if len(parts) == 1 else torch.float32)
        assert error < error_bound(dtype, truncates=self.truncates), f"relative error {error:.2e}"
        return len(parts)

    def add_norm_product(
        self,
        dtype: torch.dtype,
        rows: int,
        outputs: int,
        inputs: int,
        *,
        gelu: bool | None = None,
        parts: int = 0,
        first: bool = False,
        biased: bool = False,
    ) -> None:
        """``add_norm_linear``, or with ``gelu`` given ``add_norm_gated``.

        ``parts`` of the input, 0 for none; ``first``: there is no residual yet.
        """

        def make(seed: int) -> Tensors:
            shape = (parts, rows, inputs) if parts else (rows, inputs)
            x = self.randn(seed, *shape, dtype=torch.float32 if parts > 1 else dtype)
            return (
                x,
                self.randn(seed + 1, rows, inputs, dtype=dtype),
                self.randn(seed + 2, inputs, dtype=dtype),
                self.randn(seed + 3, outputs, inputs, dtype=dtype, scale=inputs**-0.5),
                self.randn(seed + 4, outputs, dtype=dtype),
            )

        def call(*tensors: torch.Tensor) -> Tensors:
            x, residual, norm, weight, bias = tensors
            arguments: tuple[Any, ...] = (
                x, None if first else residual, norm, 1e-6, weight, bias if biased else None,
            )  # fmt: skip
            if gelu is None:
                return self.ops.add_norm_linear(*arguments)
            return self.ops.add_norm_gated(*arguments, gelu=gelu)

        (x, residual, norm, weight, bias), (out, total) = self.run(call, make)
        summed = x.double().sum(0) if parts else x.double()
        # Rounded where an operation of its own would have left it.
        summed = (summed.to(dtype).double() + (0 if first else residual.double())).to(dtype)
        exact = _norm64(summed, norm) @ weight.double().t() + (bias.double() if biased else 0)
        if gelu is not None:
            gate, up = exact.chunk(2, dim=-1)
            activate = partial(F.gelu, approximate="tanh") if gelu else F.silu
            exact = activate(gate) * up
        assert out.dtype == total.dtype == dtype
        for got, right in ((total, summed.double()), (out, exact)):
            assert got.shape == right.shape
            error = ((got.double() - right).norm() / right.norm()).item()
            # Up to five roundings one behind the other: norm, weight, product, gate, activation.
            assert error < 5 * error_bound(dtype, truncates=self.truncates), f"{error:.2e}"

    def add_rms_norm(self, dtype: torch.dtype, rows: int, width: int) -> None:
        def make(seed: int) -> Tensors:
            x = self.randn(seed, rows, width, dtype=dtype)
            residual = self.randn(seed + 1, rows, width, dtype=dtype, scale=5)
            return x, residual, self.randn(seed + 2, width, dtype=dtype)

        (x, residual, weight), (normed, total) = self.run(
            lambda x, residual, weight: self.ops.add_rms_norm(x, residual, weight, 1e-6), make
        )
        of_norm, of_total = reference.add_rms_norm(x, residual, weight, 1e-6)
        self.close(total, x.double() + residual.double(), of_total)
        self.close(normed, _norm64(x.double() + residual.double(), weight), of_norm)

    def activation(self, name: str, dtype: torch.dtype, rows: int, width: int) -> None:
        def make(seed: int) -> Tensors:
            return [self.randn(seed, rows, 2 * width, dtype=dtype, scale=3)]

        (x,), (out,) = self.run(lambda x: [getattr(self.ops, name)(x)], make)
        by_reference = getattr(reference, name)
        # torch's gelu is 1 + tanh, ours the logistic function: equal in exact numbers. Of such
        # inputs 7 % in bfloat16 and 3 % in float16 then round to a neighbour, as near the truth.
        least = 0.9 if name == "gelu_and_mul" else 0.97
        self.close(out, by_reference(x.double()), by_reference(x), least)

    def rope_store(
        self,
        dtype: torch.dtype,
        tokens: int,
        heads: tuple[int, int],
        dim: int,
        *,
        rotary_dim: int | None = None,
        normed: bool = True,
        padding: int = 0,
        fused: bool = True,
    ) -> None:
        """``heads`` are (q, kv); with ``fused`` off, ``rope`` and ``store_kv``.

        ``padding`` elements lie between the rows of the projection. Some slots are -1, and
        nothing but the others may be written.
        """
        num_q, num_kv = heads
        num_heads, num_slots = num_q + 2 * num_kv, 2 * tokens + 3
        rotary = rotary_dim or dim

        def make(seed: int) -> Tensors:
            random = torch.Generator().manual_seed(seed)
            slots = torch.randperm(num_slots - 1, generator=random)[:tokens] + 1
            slots[torch.rand(tokens, generator=random) < 0.2] = -1
            slots[1:2] = -1
            angles = torch.rand(300, rotary // 2, generator=random) * 6
            integers = [torch.randint(0, 300, (tokens,), generator=random), slots]
            # Slot -1 of the pool, which is there, would be seen if it were written.
            pools = [
                torch.full((1 + num_slots, num_kv, dim), float("nan"), dtype=dtype)
                for _ in range(2)
            ]
            floats = [
                self.randn(seed, tokens, num_heads * dim + padding, dtype=dtype, scale=2),
                self.randn(seed + 1, dim, dtype=dtype),
                self.randn(seed + 2, dim, dtype=dtype),
            ]
            moved = [*integers, torch.cat((angles.cos(), angles.sin()), dim=1), *pools]
            return [*floats, *(tensor.to(self.device) for tensor in moved)]

        def call(rows, q_norm, k_norm, positions, slots, cos_sin, k_memory, v_memory) -> Tensors:
            k_pool, v_pool = k_memory[1:], v_memory[1:]
            qkv = rows[:, : num_heads * dim].view(tokens, num_heads, dim)
            norms = (
                {"q_norm": q_norm, "k_norm": k_norm} if normed else {"q_norm": None, "k_norm": None}
            )
            rotation = Rotation(positions, cos_sin)
            if fused:
                q = self.ops.rope_store(
                    qkv, num_q, num_kv, rotation, slots, k_pool, v_pool, **norms, norm_eps=1e-5
                )
            else:
                qk, v = qkv[:, : num_q + num_kv], qkv[:, num_q + num_kv :]
                q, k = self.ops.rope(qk, num_q, rotation, **norms, norm_eps=1e-5)
                self.ops.store_kv(k, v, slots, k_pool, v_pool)
            return q, k_memory, v_memory

        (rows, q_norm, k_norm, positions, slots, cos_sin, _, _), (q, *memory) = self.run(call, make)
        k_pool, v_pool = (tensor[1:] for tensor in memory)
        qkv = rows[:, : num_heads * dim].view(tokens, num_heads, dim)
        weights = (q_norm, k_norm) if normed else (None, None)
        q_ref, k_ref = reference.rope(
            qkv[:, : num_q + num_kv], num_q, Rotation(positions, cos_sin),
            q_norm=weights[0], k_norm=weights[1], norm_eps=1e-5,
        )  # fmt: skip
        exact = qkv[:, : num_q + num_kv].double()
        if normed:
            parts = exact.split((num_q, num_kv), dim=1)
            exact = torch.cat(
                [_norm64(part, w, 1e-5) for part, w in zip(parts, (q_norm, k_norm), strict=True)],
                dim=1,
            )
        exact = _rotated64(exact, cos_sin[positions].double())
        self.close(q, exact[:, :num_q], q_ref)
        stored, real = slots[slots >= 0], slots >= 0
        self.close(k_pool[stored], exact[real][:, num_q:], k_ref[real])
        assert torch.equal(v_pool[stored], qkv[real][:, num_q + num_kv :]), "values pass unchanged"
        untouched = torch.ones(num_slots, dtype=torch.bool, device=slots.device)
        untouched[stored] = False
        untouched[0] = False  # the dummy page
        for tensor in memory:
            assert tensor[1:][untouched].isnan().all()
            assert tensor[0].isnan().all(), "tokens without a slot are stored nowhere"

    def page_indices(self, num_rows: int, width: int, page_size: int, seed: int = 1) -> None:
        most = num_rows * width

        def make(seed: int) -> Tensors:
            random = torch.Generator().manual_seed(seed)
            table = torch.randint(0, 2**31 - 1, (num_rows + 3, width), generator=random)
            lens = torch.randint(1, width * page_size + 1, (num_rows,), generator=random)
            rows = torch.randperm(num_rows + 3, generator=random)[:num_rows]
            made = [table.int(), rows, lens.int()]
            made += [torch.full((size,), -99).int() for size in (num_rows + 1, most, num_rows)]
            return [tensor.to(self.device) for tensor in made]

        def call(table, rows, lens, indptr, indices, last) -> Tensors:
            self.ops.page_indices(table, rows, lens, page_size, indptr, indices, last)
            return indptr, indices, last

        (table, rows, lens, *outs), got = self.run(call, lambda place: make(seed + place))
        expected = [torch.full_like(out, -99) for out in outs]
        reference.page_indices(table, rows, lens, page_size, *expected)
        for out, right in zip(got, expected, strict=True):
            assert torch.equal(out, right)

    def mask_tokens(
        self, dtype: torch.dtype, num_rows: int, vocab: int, num_masks: int, seed: int = 1
    ) -> None:
        """Masks of some rows, in any order, of logits whose rows lie further apart."""

        def make(seed: int) -> Tensors:
            random = torch.Generator().manual_seed(seed)
            logits = torch.randn(num_rows, vocab + 7, generator=random).to(dtype)
            words = (vocab + 31) // 32
            masks = torch.randint(-(2**31), 2**31, (num_masks + 1, words), generator=random).int()
            places = torch.randperm(num_rows, generator=random)[:num_masks]
            which = torch.randperm(num_masks + 1, generator=random)[:num_masks]
            return [tensor.to(self.device) for tensor in (logits, places, masks, which)]

        def call(logits, places, masks, which) -> Tensors:
            changed = logits.clone()
            self.ops.mask_tokens(changed[:, :vocab], places, masks, which)
            return (changed,)

        (logits, places, masks, which), (got,) = self.run(call, lambda place: make(seed + place))
        octets = masks[which].cpu().numpy().view(np.uint8)
        allowed = torch.from_numpy(np.unpackbits(octets, axis=1, bitorder="little")).bool()
        expected = logits.cpu()  # a card would be asked for one element after another
        rows = expected[places.cpu()]
        rows[:, :vocab].masked_fill_(~allowed[:, :vocab], float("-inf"))
        expected[places.cpu()] = rows
        assert torch.equal(got.cpu(), expected)

    def refuses_masks(self) -> None:
        """Masks with too few words, or not one a row, are errors on the host."""
        logits = self.randn(1, 3, 65, dtype=torch.float32)
        places = torch.tensor([2, 0], device=self.device)
        masks = torch.zeros(2, 3, dtype=torch.int32, device=self.device)
        with pytest.raises(ValueError, match=r"2 words hold 64 tokens, .* 65: .* have 3 words"):
            self.ops.mask_tokens(logits, places, masks[:, :2], places)
        with pytest.raises(ValueError, match="2 rows are to be masked, with 1 masks named"):
            self.ops.mask_tokens(logits, places, masks, places[:1])

    def sampling(
        self,
        dtype: torch.dtype,
        num_rows: int,
        vocab: int,
        *,
        filters: Sequence[str] = (),
        scale: float = 3.0,
        padding: int = 0,
        seed: int = 1,
    ) -> None:
        """Rows of all kinds; ``filters`` says which some of the rows use."""

        def make(seed: int) -> Tensors:
            random = torch.Generator().manual_seed(seed)

            def some(values: torch.Tensor, name: str, neutral: float) -> torch.Tensor:
                used = (torch.rand(num_rows, generator=random) < 0.7) & (name in filters)
                return torch.where(used, values, torch.full_like(values, neutral))

            temperature = torch.rand(num_rows, generator=random) * 2 + 0.05
            temperature[torch.rand(num_rows, generator=random) < 0.2] = 0
            top_k = torch.randint(1, min(vocab, 80) + 2, (num_rows,), generator=random)
            made = [
                temperature,
                some(top_k, "top_k", 0),
                some(torch.rand(num_rows, generator=random), "top_p", 1),
                some(torch.rand(num_rows, generator=random) * 0.4, "min_p", 0),
                torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=random),
                torch.randint(0, 100_000, (num_rows,), generator=random),
            ]
            logits = self.randn(seed, num_rows, vocab + padding, dtype=dtype, scale=scale)
            return [logits, *(tensor.to(self.device) for tensor in made)]

        def call(logits, temperature, top_k, top_p, min_p, seeds, positions) -> Tensors:
            logits = logits[:, :vocab]
            if not filters:
                return [self.ops.sample_gumbel(logits, temperature, seeds, positions)]
            return [
                self.ops.sample_filtered(logits, temperature, top_k, top_p, min_p, seeds, positions)
            ]

        (logits, *params), (tokens,) = self.run(call, lambda place: make(seed + place))
        check_tokens(tokens, logits[:, :vocab], *params)


def check_tokens(
    tokens: torch.Tensor,
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Check each row's token against float64, with slack only where roundings decide."""
    assert tokens.dtype == torch.int64
    ids = torch.arange(logits.shape[1], device=logits.device)
    noise = gumbel_noise(seeds, positions, ids).double()
    for row, token in enumerate(tokens.tolist()):
        if temperature[row] == 0:
            assert token == int(logits[row].float().argmax()), f"row {row} is greedy"
            continue
        scaled = logits[row].double() / temperature[row].double()
        one = (int(top_k[row]), float(top_p[row]), float(min_p[row]))
        assert passing(scaled, *one, slack=1e-5)[token], f"row {row}: {token} does not pass {one}"
        score = scaled + noise[row]
        best = score[passing(scaled, *one, slack=-1e-5)].max()
        # Noise is approximated within 1e-5; logits of this size are rounded by less.
        assert score[token] > best - 1e-4, f"row {row}: {token} is not the best of {one}"


def passing(
    scaled: torch.Tensor, top_k: int, top_p: float, min_p: float, *, slack: float
) -> torch.Tensor:
    """Return, bool ``[vocab]``, which tokens pass; ``slack`` widens what roundings decide."""
    order = scaled.argsort(descending=True, stable=True)
    if top_k > 0:
        order = order[:top_k]
    probs = scaled.softmax(-1)[order]
    probs /= probs.sum()
    before = probs.cumsum(0) - probs
    keep = (before < top_p + slack) | (top_p >= 1)
    keep &= probs >= min_p * probs[0] * (1 - slack)
    keep[0] = True
    passes = torch.zeros(len(scaled), dtype=torch.bool, device=scaled.device)
    passes[order[keep]] = True
    return passes


def _norm64(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


def _rotated64(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate ``[T, heads, d]`` by ``[T, rotary_dim]``, the first half of it cosines."""
    half = cos_sin.shape[-1] // 2
    cos, sin = cos_sin.unsqueeze(1).split(half, dim=-1)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
