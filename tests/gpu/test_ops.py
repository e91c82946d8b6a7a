"""Every operation that a card gets, against references in float64: eagerly and in a CUDA graph.

The shapes are those of Qwen3 and Llama models, and odd ones; see ``support.op_checks`` for how
outputs are poisoned and compared.
"""

import pytest
import torch

from minisgl.kernel import OpTable
from minisgl.kernel.sampling import sample_filtered, sample_gumbel
from minisgl.plugins.host import load_plugins
from minisgl.plugins.records import BackendQuery
from minisgl.plugins.selection import select_ops
from support.op_checks import DTYPES, Checks, Run, run_eagerly, run_recorded

pytestmark = pytest.mark.gpu

VOCAB = 151_936
ODD_VOCAB = 9_001
"""No multiple of anything: rows begin anywhere."""


def chosen_ops(dtype: torch.dtype) -> OpTable:
    """The table that the host selects for this card."""
    name = str(dtype).removeprefix("torch.")
    query = BackendQuery(
        device="cuda", compute_capability=torch.cuda.get_device_capability(), dtype=name,
        kv_dtype=name, page_size=16, num_q_heads=16, num_kv_heads=8, head_dim=128,
    )  # fmt: skip
    return select_ops(load_plugins(), query)


@pytest.fixture(params=[run_eagerly, run_recorded], ids=["eager", "graph"])
def run(request: pytest.FixtureRequest) -> Run:
    return request.param


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def checks(run: Run, dtype: torch.dtype) -> Checks:
    return Checks(chosen_ops(dtype), "cuda", run)


def test_triton_serves_every_operation_with_a_fast_form(dtype: torch.dtype) -> None:
    chosen, reference = chosen_ops(dtype), OpTable()
    slow = {name for name in OpTable.__slots__ if getattr(chosen, name) is getattr(reference, name)}
    # Few entries a row, or few rows: torch's own kernels do.
    plain = {"mask_logits", "bias_logits", "ban_sequences", "token_logprobs"}
    assert slow == plain | ({"linear"} if dtype == torch.float32 else set())


@pytest.mark.parametrize("rows", [1, 256, 8192])
@pytest.mark.parametrize("width", [1024, 5120, 77])
def test_norms(checks: Checks, dtype: torch.dtype, rows: int, width: int) -> None:
    checks.rms_norm(dtype, (rows, width))
    checks.add_rms_norm(dtype, rows, width)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 64])
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(4096, 1024), (1024, 3072), (5120, 17408), (77, 200)]
)
def test_linear(checks: Checks, dtype: torch.dtype, rows: int, outputs: int, inputs: int) -> None:
    checks.linear(dtype, rows, outputs, inputs, biased=rows == 3)


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 64, 100, 128, 129])
@pytest.mark.parametrize(("outputs", "inputs"), [(1024, 2048), (1024, 3072), (5120, 17408)])
def test_linear_in_parts(
    checks: Checks, dtype: torch.dtype, rows: int, outputs: int, inputs: int
) -> None:
    num_parts = checks.linear_parts(dtype, rows, outputs, inputs, biased=rows == 17)
    small = outputs == 1024 and 1 < rows <= 128 and dtype != torch.float32
    assert (num_parts > 1) == small


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 64, 100, 128, 129])
@pytest.mark.parametrize("gelu", [None, False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 1024), (7168, 5120), (154, 200)])
def test_sum_norm_and_product(
    checks: Checks,
    dtype: torch.dtype,
    rows: int,
    gelu: bool | None,
    outputs: int,
    inputs: int,
) -> None:
    shape = (dtype, rows, outputs, inputs)
    checks.add_norm_product(*shape, gelu=gelu, parts=1)
    checks.add_norm_product(*shape, gelu=gelu, parts=3, biased=True)
    checks.add_norm_product(*shape, gelu=gelu, first=True)


@pytest.mark.parametrize("shape", [(1, 16, 128), (300, 16, 128), (9, 3, 80)])
def test_norms_of_heads_in_a_projection(
    checks: Checks, dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    checks.rms_norm(dtype, shape, row_stride=2 * shape[1] * shape[2])


@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul"])
@pytest.mark.parametrize(("rows", "width"), [(1, 3072), (8192, 3072), (5, 777)])
def test_activations(checks: Checks, dtype: torch.dtype, name: str, rows: int, width: int) -> None:
    checks.activation(name, dtype, rows, width)


@pytest.mark.parametrize("tokens", [1, 7, 256, 8192])
@pytest.mark.parametrize(("heads", "normed"), [((16, 8), True), ((40, 8), True), ((14, 2), False)])
def test_rope_store(
    checks: Checks, dtype: torch.dtype, tokens: int, heads: tuple[int, int], normed: bool
) -> None:
    checks.rope_store(dtype, tokens, heads, 128, normed=normed)


@pytest.mark.parametrize(("dim", "rotary_dim"), [(64, 64), (80, 80), (96, 64), (256, 256)])
def test_rope_store_of_other_dimensions(
    checks: Checks, dtype: torch.dtype, dim: int, rotary_dim: int
) -> None:
    checks.rope_store(dtype, 130, (14, 2), dim, rotary_dim=rotary_dim, padding=16)


@pytest.mark.parametrize(("heads", "dim"), [((16, 8), 128), ((3, 1), 80)])
@pytest.mark.parametrize("padding", [0, 3])
def test_rope_and_store_kv_in_turn(
    run: Run, heads: tuple[int, int], dim: int, padding: int
) -> None:
    checks = Checks(chosen_ops(torch.bfloat16), "cuda", run)
    checks.rope_store(torch.bfloat16, 300, heads, dim, padding=padding, fused=False)


@pytest.mark.parametrize(
    ("rows", "width", "page_size"),
    [(1, 256, 16), (256, 256, 16), (256, 4096, 1), (33, 5000, 1), (4096, 64, 64), (1000, 3, 256)],
)
def test_page_indices(run: Run, rows: int, width: int, page_size: int) -> None:
    Checks(chosen_ops(torch.bfloat16), "cuda", run).page_indices(rows, width, page_size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "masks"), [(1, 1), (256, 9), (33, 33)])
def test_mask_tokens(run: Run, dtype: torch.dtype, rows: int, masks: int) -> None:
    Checks(chosen_ops(torch.bfloat16), "cuda", run).mask_tokens(dtype, rows, 5000, masks)


FILTERS = [(), ("top_k",), ("top_p",), ("min_p",), ("top_k", "top_p", "min_p")]


@pytest.mark.parametrize("filters", FILTERS, ids="+".join)
@pytest.mark.parametrize(("rows", "vocab"), [(1, VOCAB), (37, VOCAB), (60, ODD_VOCAB)])
def test_sampling(
    checks: Checks, dtype: torch.dtype, rows: int, vocab: int, filters: tuple[str, ...]
) -> None:
    checks.sampling(dtype, rows, vocab, filters=filters)


@pytest.mark.parametrize("filters", FILTERS, ids="+".join)
def test_sampling_of_flat_and_tied_logits(
    checks: Checks, dtype: torch.dtype, filters: tuple[str, ...]
) -> None:
    """Thousands of tokens pass, and borders fall among equals."""
    for seed in range(3):
        checks.sampling(dtype, 40, ODD_VOCAB, filters=filters, scale=0.02, seed=seed)


def params_of(rows: int, seed: int = 11) -> list[torch.Tensor]:
    """Temperature, top_k, top_p, min_p, seed, position of rows that filter a little."""
    random = torch.Generator(device="cuda").manual_seed(seed)

    def integers(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (rows,), device="cuda", generator=random)

    uniform = torch.rand(3, rows, device="cuda", generator=random).unbind(0)
    return [
        uniform[0] + 0.3,
        integers(20, 2000),
        uniform[1] * 0.3 + 0.7,
        uniform[2] * 0.01,
        integers(0, 2**62),
        integers(0, 4096),
    ]


def test_a_seeded_request_gets_its_token_in_batches_of_any_size(dtype: torch.dtype) -> None:
    ops = chosen_ops(dtype)
    logits = torch.randn(256, VOCAB, device="cuda", dtype=dtype) * 2
    params = params_of(256)
    drawn = ops.sample_gumbel(logits, params[0], *params[4:])
    filtered = ops.sample_filtered(logits, *params)
    for size in (1, 2, 7, 64):
        for first in (0, 5, 256 - size):
            some = slice(first, first + size)
            part = [param[some] for param in params]
            alone = ops.sample_gumbel(logits[some], part[0], *part[4:])
            assert torch.equal(alone, drawn[some])
            assert torch.equal(ops.sample_filtered(logits[some], *part), filtered[some])


def test_rows_without_filters_draw_what_they_draw_without_them(dtype: torch.dtype) -> None:
    ops = chosen_ops(dtype)
    logits = torch.randn(64, VOCAB, device="cuda", dtype=dtype)
    params = params_of(64)
    params[0][::3] = 0
    for place, neutral in ((1, 0), (2, 1.0), (3, 0.0)):
        params[place][::2] = neutral
    drawn = ops.sample_gumbel(logits, params[0], *params[4:])
    filtered = ops.sample_filtered(logits, *params)
    assert torch.equal(drawn[::2], filtered[::2])
    assert torch.equal(drawn[::3], filtered[::3]), "greedy rows ignore filters"


def test_nearly_all_tokens_are_those_of_the_reference(dtype: torch.dtype) -> None:
    """Others only where two scores are as good as equal: about one in 10,000."""
    ops = chosen_ops(dtype)
    differ = 0
    for seed in range(4):
        logits = torch.randn(64, VOCAB, device="cuda", dtype=dtype) * 3
        params = params_of(64, seed)
        mine = ops.sample_gumbel(logits, params[0], *params[4:])
        differ += int((mine != sample_gumbel(logits, params[0], *params[4:])).sum())
        mine = ops.sample_filtered(logits, *params)
        differ += int((mine != sample_filtered(logits, *params)).sum())
    assert differ <= 2


@pytest.mark.parametrize("filters", [{}, {"top_k": 400}, {"top_p": 0.9}])
def test_frequencies_follow_the_softmax(filters: dict[str, float]) -> None:
    """300,000 draws among tokens in nine blocks; the filters cut none, or the rarest."""
    ops = chosen_ops(torch.float32)
    rows, vocab = 300_000, ODD_VOCAB
    random = torch.Generator(device="cuda").manual_seed(5)
    logits = (torch.rand(vocab, device="cuda", generator=random) * 4).sort(descending=True).values
    logits = logits[torch.randperm(vocab, device="cuda", generator=random)]
    probs = logits.double().softmax(0)
    ordered = probs.sort(descending=True)
    kept = torch.ones(vocab, dtype=torch.bool, device="cuda")
    if "top_k" in filters:
        kept[ordered.indices[400:]] = False
    if "top_p" in filters:
        before = ordered.values.cumsum(0) - ordered.values
        kept[ordered.indices[before >= 0.9]] = False
    probs = torch.where(kept, probs, 0)
    probs /= probs.sum()
    ones = torch.ones(rows, device="cuda")
    temperature, top_p, min_p = ones, ones * filters.get("top_p", 1), ones * 0
    top_k = torch.full((rows,), int(filters.get("top_k", 0)), device="cuda")
    seed, positions = torch.full_like(top_k, 77), torch.arange(rows, device="cuda")
    spread = logits.expand(rows, vocab)
    if filters:
        tokens = ops.sample_filtered(spread, temperature, top_k, top_p, min_p, seed, positions)
    else:
        tokens = ops.sample_gumbel(spread, temperature, seed, positions)
    counts = torch.bincount(tokens, minlength=vocab).double()
    assert counts[~kept].sum() == 0
    expected = rows * probs[kept]
    chi_square = ((counts[kept] - expected).square() / expected).sum().item()
    freedom = int(kept.sum()) - 1
    assert abs(chi_square - freedom) < 6 * (2 * freedom) ** 0.5


def test_nothing_is_compiled_for_another_number_of_tokens() -> None:
    """One call of each operation, then any number of rows: every kernel has been compiled."""
    from triton.runtime import jit

    checks = Checks(chosen_ops(torch.bfloat16), "cuda")

    def everything(rows: int) -> None:
        checks.rms_norm(torch.bfloat16, (rows, 1024))
        checks.add_rms_norm(torch.bfloat16, rows, 1024)
        checks.activation("silu_and_mul", torch.bfloat16, rows, 3072)
        checks.rope_store(torch.bfloat16, rows, (16, 8), 128)
        checks.rope_store(torch.bfloat16, rows, (16, 8), 128, fused=False)
        checks.page_indices(rows, 256, 16)
        checks.sampling(torch.bfloat16, rows, VOCAB)
        checks.sampling(torch.bfloat16, rows, VOCAB, filters=FILTERS[-1])
        checks.mask_tokens(torch.bfloat16, rows, 500, 1)

    everything(5)
    compiled: list[str] = []
    compile_now = jit.JITFunction._do_compile

    def noting(self, *arguments, **keywords):
        compiled.append(self.__name__)
        return compile_now(self, *arguments, **keywords)

    jit.JITFunction._do_compile = noting
    try:
        for rows in (1, 2, 16, 17, 33, 256):
            everything(rows)
    finally:
        jit.JITFunction._do_compile = compile_now
    assert compiled == []
