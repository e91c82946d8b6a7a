"""Triton's kernels against references: in its interpreter, or on a card where there is one.

``tests/gpu/test_ops.py`` has the shapes of real models.
"""

import json
import os
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from triton import jit
from triton import language as tl

from minisgl.engine.control_state import ControlState
from minisgl.kernel import OpTable, triton
from minisgl.kernel.sampling import noise_bits
from minisgl.kernel.triton.sampling import uniform_noise
from support.examples import scaled
from support.op_checks import DTYPES, Checks, check_tokens

ON_CARD = torch.cuda.is_available()
CHECKS = Checks(
    OpTable(**{name: getattr(triton, name) for name in triton.__all__}),
    "cuda" if ON_CARD else "cpu",
    truncates=not ON_CARD,
)
OPS = CHECKS.ops


def test_the_interpreter_runs_where_there_is_no_card():
    assert (os.environ.get("TRITON_INTERPRET") != "1") == ON_CARD


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "row_stride"), [((3, 96), 0), ((2, 1300), 1310), ((4, 3, 80), 400), ((1, 2048), 0)]
)
def test_rms_norm(dtype, shape, row_stride):
    CHECKS.rms_norm(dtype, shape, row_stride=row_stride)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 1000), (2, 5120)])
def test_add_rms_norm(dtype, rows, width):
    CHECKS.add_rms_norm(dtype, rows, width)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"),
    [(1, 7, 96), (1, 5, 1030), (3, 5, 64), (5, 64, 128), (17, 32, 256)],
)
def test_linear(dtype, biased, rows, outputs, inputs):
    CHECKS.linear(dtype, rows, outputs, inputs, biased=biased)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_in_parts(dtype, biased):
    whole = dtype == torch.float32
    for rows, outputs, inputs in ((1, 7, 96), (5, 6, 64), (16, 64, 256), (130, 8, 32)):
        assert CHECKS.linear_parts(dtype, rows, outputs, inputs, biased=biased) == 1
    for rows, inputs, parts in ((5, 1024, 2), (17, 1536, 3), (65, 1024, 2)):
        found = CHECKS.linear_parts(dtype, rows, 32, inputs, biased=biased)
        assert found == (1 if whole else parts)


INPUTS = (
    {"biased": True}, {"parts": 1}, {"parts": 3}, {"parts": 2, "first": True, "biased": True},
)  # fmt: skip


@pytest.mark.parametrize("gelu", [None, False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_norm_and_product(dtype, gelu):
    """Any two of type, activation, shape and input meet in one case."""
    shapes = ((1, 10, 96), (1, 6, 1030), (3, 64, 128), (16, 10, 96), (70, 64, 256))
    first = DTYPES.index(dtype) + (None, False, True).index(gelu)
    for place, (rows, outputs, inputs) in enumerate(shapes):
        check = partial(CHECKS.add_norm_product, dtype, rows, outputs, inputs, gelu=gelu)
        check(**INPUTS[(first + place) % len(INPUTS)])


@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 5), (3, 1100)])
def test_activations(name, dtype, rows, width):
    CHECKS.activation(name, dtype, rows, width)


@pytest.mark.parametrize("name", ["rms_norm", "silu_and_mul"])
def test_any_dimensions_and_strides_are_taken(name):
    x = CHECKS.randn(1, 2, 3, 4, 32, dtype=torch.float32)
    arguments = (x[0, 0, 0], 1e-6) if name == "rms_norm" else ()
    right = getattr(OpTable(), name)
    for view in (x, x.transpose(1, 2), x.transpose(0, 3)[:, 0, :, :1].expand(-1, -1, 32)):
        torch.testing.assert_close(getattr(OPS, name)(view, *arguments), right(view, *arguments))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    ("heads", "dim", "rotary_dim", "normed"),
    [
        ((4, 2), 64, 64, True),
        ((5, 1), 80, 80, False),
        ((3, 3), 96, 64, True),
        ((14, 2), 128, 128, True),
        ((2, 1), 256, 128, False),
    ],
)
def test_rope_and_store(dtype, fused, heads, dim, rotary_dim, normed):
    CHECKS.rope_store(
        dtype, 5, heads, dim, rotary_dim=rotary_dim, normed=normed, padding=16, fused=fused
    )


@given(st.integers(1, 6), st.integers(1, 9), st.integers(1, 3), st.integers(1, 20), st.data())
@settings(max_examples=scaled(20))  # an example interprets up to 12 programs
def test_rope_store_takes_any_heads_and_dimensions(tokens, num_q, num_kv, half, data):
    rotary = 2 * data.draw(st.integers(1, half))
    normed = data.draw(st.booleans())
    CHECKS.rope_store(
        torch.float32,
        tokens,
        (num_q, num_kv),
        2 * half,
        rotary_dim=rotary,
        normed=normed,
        padding=3,
    )


@pytest.mark.parametrize("size", [(1, 5, 4), (7, 20, 16), (40, 3, 1), (3, 2100, 1)])
def test_page_indices(size):
    CHECKS.page_indices(*size)


@given(st.integers(1, 12), st.integers(1, 30), st.integers(1, 256), st.integers(0, 2**20))
@settings(max_examples=scaled(20))  # an example interprets up to 12 programs
def test_page_indices_of_any_rows(num_rows, width, page_size, seed):
    CHECKS.page_indices(num_rows, width, page_size, seed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(1, 31, 1), (3, 32, 2), (5, 263, 0), (7, 4096 + 33, 7)])
def test_mask_tokens(dtype, size):
    CHECKS.mask_tokens(dtype, *size)


def test_masks_that_do_not_fit_are_refused():
    """Catches: words behind the last mask that are read for it."""
    CHECKS.refuses_masks()


def test_penalties_of_more_tokens_than_are_counted_are_refused():
    state = ControlState(1, 40, 1, torch.device(CHECKS.device)).tensors
    logits = torch.zeros(1, 41, device=CHECKS.device)
    with pytest.raises(ValueError, match="count 40 tokens, but the logits have 41"):
        OPS.penalize(logits, torch.tensor([0], device=CHECKS.device), state)


FILTERS = [(), ("top_k",), ("top_p",), ("min_p",), ("top_k", "top_p", "min_p")]


@pytest.mark.parametrize(
    ("dtype", "filters"),
    [
        *((torch.bfloat16, filters) for filters in FILTERS),
        *((dtype, FILTERS[place]) for dtype in (torch.float32, torch.float16) for place in (0, -1)),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else str(value),
)
def test_sampling(dtype, filters):
    CHECKS.sampling(dtype, 6, 1300, filters=filters, padding=5)


@given(st.integers(1, 40), st.sampled_from(FILTERS), st.integers(0, 2**20))
@settings(max_examples=scaled(10))  # an example interprets 40 programs
def test_sampling_of_coarse_logits_with_many_ties(vocab, filters, seed):
    """Logits of half precision and few values: borders of filters fall among equals."""
    CHECKS.sampling(torch.bfloat16, 3, vocab, filters=filters, scale=0.01, seed=seed)


def params_of(rows, **values):
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "position": 0}
    dtypes = [torch.float32, torch.int64, torch.float32, torch.float32, torch.int64, torch.int64]
    return [
        torch.as_tensor(values.get(name, default))
        .expand(rows)
        .to(CHECKS.device, dtype)
        .contiguous()
        for (name, default), dtype in zip(neutral.items(), dtypes, strict=True)
    ]


def draw(logits, **values):
    """Tokens by both operations, which agree wherever nothing is filtered."""
    logits = logits.to(CHECKS.device)
    params = params_of(len(logits), **values)
    filtered = OPS.sample_filtered(logits, *params)
    if not {"top_k", "top_p", "min_p"} & set(values):
        assert torch.equal(OPS.sample_gumbel(logits, params[0], *params[4:]), filtered)
    return filtered.cpu()


@pytest.fixture(autouse=True)
def _quiet_numpy():
    """Interpreted kernels overflow and divide in numpy, which warns of it."""
    with np.errstate(all="ignore"):
        yield


def test_filters_cut_among_equals_by_id():
    rows = 300 if ON_CARD else 5
    logits = torch.zeros(rows, 2100, dtype=torch.bfloat16)
    logits[:, [5, 1500, 2050]] = 9.0
    for filters, kept in (
        ({"top_k": 5}, {0, 1, 5, 1500, 2050}),
        ({"top_k": 2}, {5, 1500}),
        ({"top_p": 0.4}, {5, 1500}),
        ({"top_k": 2, "top_p": 0.4}, {5}),
        ({"min_p": 0.5}, {5, 1500, 2050}),
    ):
        drawn = draw(logits, seed=torch.arange(rows), **filters)
        assert set(drawn.tolist()) <= kept, filters
        assert len(set(drawn.tolist())) >= min(2, len(kept)), "all of them can be drawn"


def test_top_p_zero_and_top_k_one_are_greedy():
    logits = CHECKS.randn(3, 4, 1500, dtype=torch.bfloat16)
    best = logits.float().argmax(-1).cpu()
    for filters in ({"top_p": 0.0}, {"top_k": 1}, {"min_p": 1.0}, {"temperature": 0.0}):
        drawn = draw(logits, seed=torch.arange(4), **filters)
        ties = logits.cpu().gather(1, drawn[:, None]) == logits.cpu().gather(1, best[:, None])
        assert ties.all() if "min_p" in filters else torch.equal(drawn, best), filters


def test_extreme_temperatures_and_logits():
    logits = torch.tensor([1000.0, 0.0, 999.0, -1000.0]).expand(4, 4)
    cold = draw(logits, temperature=torch.tensor([1e-6, 1e-20, 1e-38, 1e-45]), seed=torch.arange(4))
    assert cold.eq(0).all()
    hot = draw(torch.tensor([[1e30, -1e30, 0.0]]), temperature=1e-30)
    assert hot.eq(0).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_whatever_the_logits_are_a_token_of_the_vocabulary_comes_out(value):
    """7 tokens in a block of many more, and 1030 in two."""
    for vocab in (7, 1030):
        rows = torch.full((5, vocab), value, dtype=torch.bfloat16)
        rows[1, 3] = 0.0
        rows[2] = 0.0
        rows[2, 3] = value
        temperature = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0])
        for filters in ({}, {"top_k": 2, "top_p": 0.5, "min_p": 0.1}):
            drawn = draw(rows, temperature=temperature, seed=torch.arange(5), **filters)
            assert ((drawn >= 0) & (drawn < vocab)).all()
            if value == float("-inf"):
                assert drawn[1] == 3
                assert drawn[2] != 3


def test_banned_tokens_are_never_drawn():
    logits = torch.full((2000 if ON_CARD else 6, 9), float("-inf"))
    logits[:, [2, 6]] = 1.0
    drawn = draw(logits, seed=torch.arange(len(logits)))
    assert set(drawn.tolist()) == {2, 6}


def test_a_seeded_row_gets_its_token_in_any_batch():
    logits = CHECKS.randn(4, 5, 1100, dtype=torch.bfloat16)
    values = {"seed": torch.arange(5) * 2**40 + 3, "position": torch.arange(5) + 9}
    for filters in ({}, {"top_p": 0.7, "top_k": 50}):
        together = draw(logits, **values, **filters)
        backwards = draw(
            logits.flip(0), **{name: value.flip(0) for name, value in values.items()}, **filters
        )
        assert torch.equal(backwards.flip(0), together)
        alone = draw(logits[2:3], seed=values["seed"][2], position=values["position"][2], **filters)
        assert alone[0] == together[2]


@jit
def _uniform_kernel(seed_ptr, positions_ptr, out_ptr, num: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, num)
    seed, position = tl.load(seed_ptr + row), tl.load(positions_ptr + row)
    uniform = uniform_noise(seed, position, columns.to(tl.uint32))
    tl.store(out_ptr + row * num + columns, uniform)


def test_random_numbers_are_the_references_bit_for_bit():
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, 77 * 2**33 + 5, -(2**63)], device=CHECKS.device)
    positions = torch.tensor([0, 1, 2, 40_000, 2**31 - 1, 9], device=CHECKS.device)
    out = torch.empty(6, 512, device=CHECKS.device)
    _uniform_kernel[(6,)](seeds, positions, out, 512)
    bits = noise_bits(seeds, positions, torch.arange(512, device=CHECKS.device))
    assert torch.equal(out, (((bits >> 9) & 0x7FFFFF).float() + 0.5) / 2**23)


@pytest.mark.parametrize("num_likely", [1, 2, 5, 1024])
def test_blocks_of_few_or_many_likely_tokens_draw_the_references(num_likely):
    """With few of them any noise can win; with many, only the largest."""
    rows = 400 if ON_CARD else 60
    logits = torch.full((rows, 1024), -60.0, device=CHECKS.device)
    logits[:, :num_likely] = CHECKS.randn(5, rows, num_likely, dtype=torch.float32)
    params = params_of(rows, seed=torch.arange(rows))
    tokens = OPS.sample_gumbel(logits, params[0], *params[4:])
    check_tokens(tokens, logits, *params)


def test_frequencies_follow_the_softmax():
    probs = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])
    rows = 50_000 if ON_CARD else 120
    logits = probs.log().expand(rows, 5)
    params = params_of(rows, position=torch.arange(rows))
    tokens = OPS.sample_gumbel(logits.to(CHECKS.device), params[0], *params[4:]).cpu()
    check_tokens(tokens, logits, *(param.cpu() for param in params))
    counts = torch.bincount(tokens, minlength=5)
    chi_square = ((counts - rows * probs).square() / (rows * probs)).sum()
    assert chi_square < 20, "4 degrees of freedom: 18.5 is exceeded once in 1,000"


@pytest.mark.parametrize(("vocab", "stride"), [(5000, 5000), (37, 41), (4096, 4112)])
def test_penalties(vocab, stride):
    """Rows in any order, of more state than rows, with bans among the logits."""
    random = torch.Generator().manual_seed(vocab)
    state = ControlState(6, vocab, 1, torch.device(CHECKS.device)).tensors
    state.counts.copy_(torch.randint(0, 9, state.counts.shape, generator=random))
    for values in state[2:5]:
        values.copy_(torch.rand(7, generator=random) + 0.3)
    rows = torch.tensor([4, 0, 5], device=CHECKS.device)
    logits = torch.randn(3, stride, generator=random).to(CHECKS.device)[:, :vocab]
    logits[0, 3] = float("-inf")
    expected = logits.clone()
    OpTable().penalize(expected, rows, state)
    OPS.penalize(logits, rows, state)
    assert torch.allclose(logits, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_every_kernel_compiles_for_a_card_and_reads_16_bytes_at_a_time(tmp_path):
    """What the interpreter takes and the compiler does not; and rows that lose their alignment."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    script = [sys.executable, "-m", "support.compile_kernels", "90"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    of_rows = {"_apply_plan_kernel", "_advance_rows_kernel"}
    of_lists = {"_page_indices_kernel", "_pick_kernel", "_mask_tokens_kernel", "_order_kernel"}
    wide = {one["kernel"] for one in compiled if one["bits"] == 128}
    assert {one["kernel"] for one in compiled} == wide | of_rows | of_lists
    assert len(wide) == 16
