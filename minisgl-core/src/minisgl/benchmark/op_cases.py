"""The operations of the table at the shapes of a model: inputs, what each moves or computes."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

import torch

from minisgl.benchmark.published import CONFIGS, published_config
from minisgl.benchmark.timing import Call, num_copies
from minisgl.errors import SettingsError
from minisgl.kernel.rotation import Rotation
from minisgl.plugins.records import BackendQuery

_EPS: Final = 1e-6
_MOST_SAMPLED_ROWS: Final = 1024
"""Head and sampling run on one token a request, of which there are never thousands."""

_KV_LEN, _PAGE_SIZE, _TABLE_WIDTH = 900, 16, 256
"""Tokens of a row, of a page, and columns of the page table, where pages are listed."""

_MOST_POSITIONS: Final = 4096

_FUSED: Final = MappingProxyType(
    {"qkv": "add_norm_linear", "o": "linear_parts", "gate_up": "add_norm_gated",
     "down": "linear_parts"}
)  # fmt: skip
"""What a decoder layer calls for its products."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What the sizes of a decoder's operations follow from; as in ``config.json``."""

    name: str
    hidden: int
    intermediate: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    qk_norm: bool

    def query(self, device: torch.device, dtype: torch.dtype) -> BackendQuery:
        """Return what implementations of operations are asked about this model."""
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        name = str(dtype).removeprefix("torch.")
        return BackendQuery(
            device=device.type,
            compute_capability=capability,
            dtype=name,
            kv_dtype=name,
            page_size=16,
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCase:
    """One operation at one shape.

    Attributes:
        op: name of the entry of the op table.
        label: which of several uses, such as ``qkv``; empty if there is one.
        rows: tokens of the launch.
        kind: whether ``amount`` is bytes read and written, or floating-point operations.
        amount: of one call.
        bytes_each: bytes of one call's inputs and outputs.
        inputs: returns a call on fresh inputs, given the implementation.
    """

    op: str
    label: str
    rows: int
    kind: Literal["bytes", "flops"]
    amount: int
    bytes_each: int
    inputs: Callable[[Callable[..., Any]], Call]

    def calls(self, implementation: Callable[..., Any], device: torch.device) -> list[Call]:
        """Return calls on different inputs, together much more than a cache holds."""
        copies = num_copies(self.bytes_each, device)
        return [self.inputs(implementation) for _ in range(copies)]


def model_shape(reference: str) -> ModelShape:
    """Return the shape of a published model, or of a folder with a ``config.json``.

    Raises:
        SettingsError: it is neither.
    """
    file = Path(reference) / "config.json"
    if reference in CONFIGS or not file.is_file():
        try:
            config: Mapping[str, Any] = published_config(reference)
        except SettingsError as error:
            raise SettingsError(f"{error} A folder with a config.json is taken, too.") from error
    else:
        config = _read_config(file)
    try:
        return ModelShape(
            name=Path(reference).name,
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            num_q_heads=config["num_attention_heads"],
            num_kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
            head_dim=config.get("head_dim")
            or config["hidden_size"] // config["num_attention_heads"],
            vocab=config["vocab_size"],
            qk_norm=str(config.get("model_type", "")).startswith("qwen3"),
        )
    except KeyError as error:
        raise SettingsError(f"{str(file)!r} has no {error.args[0]}") from error
    except (TypeError, ZeroDivisionError) as error:
        raise SettingsError(f"{str(file)!r} is no configuration of a model: {error}") from error


def _read_config(file: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(f"{str(file)!r} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise SettingsError(f"{str(file)!r} must hold a JSON object, found {type(config).__name__}")
    return config


def op_cases(
    shape: ModelShape, rows: Sequence[int], device: torch.device, dtype: torch.dtype
) -> Iterator[OpCase]:
    """Yield the operations of one decoder layer and the head, for each number of rows."""
    make = _Maker(shape, device, dtype)
    for num in rows:
        yield make.norm(num)
        yield make.add_norm(num)
        yield make.activation(num)
        yield make.rope(num)
        yield make.store(num)
        yield make.rope_store(num)
        for label, inner, outer in make.products():
            if label != "head" or num <= _MOST_SAMPLED_ROWS:
                yield make.linear(num, label, inner, outer)
            if label in _FUSED:
                yield make.fused(num, label, inner, outer)
        if num <= _MOST_SAMPLED_ROWS:
            yield make.page_indices(num)
            yield make.sample(num)
            yield make.sample_filtered(num)


class _Maker:
    """Makes the cases of one model on one device."""

    def __init__(self, shape: ModelShape, device: torch.device, dtype: torch.dtype) -> None:
        self._shape, self._item = shape, dtype.itemsize
        self._randn = partial(torch.randn, dtype=dtype, device=device)
        self._device = device
        self._weight = self._randn(shape.hidden)
        self._head_norm = self._randn(shape.head_dim) if shape.qk_norm else None
        angles = torch.rand(_MOST_POSITIONS, shape.head_dim // 2, device=device)
        self._cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)

    def norm(self, rows: int) -> OpCase:
        hidden = self._shape.hidden

        def inputs(implementation: Callable[..., Any]) -> Call:
            return partial(implementation, self._randn(rows, hidden), self._weight, _EPS)

        return self._moving("rms_norm", rows, 2 * rows * hidden, inputs)

    def add_norm(self, rows: int) -> OpCase:
        hidden = self._shape.hidden

        def inputs(implementation: Callable[..., Any]) -> Call:
            x, residual = self._randn(rows, hidden), self._randn(rows, hidden)
            return partial(implementation, x, residual, self._weight, _EPS)

        return self._moving("add_rms_norm", rows, 4 * rows * hidden, inputs)

    def activation(self, rows: int) -> OpCase:
        inner = self._shape.intermediate

        def inputs(implementation: Callable[..., Any]) -> Call:
            return partial(implementation, self._randn(rows, 2 * inner))

        return self._moving("silu_and_mul", rows, 3 * rows * inner, inputs)

    def rope(self, rows: int) -> OpCase:
        shape = self._shape
        heads = shape.num_q_heads + shape.num_kv_heads

        def inputs(implementation: Callable[..., Any]) -> Call:
            # A view of the projection's output, with V behind it, as the attention layer has it.
            projected = self._randn(rows, heads + shape.num_kv_heads, shape.head_dim)
            return partial(
                implementation, projected[:, :heads], shape.num_q_heads, self._rotation(rows),
                q_norm=self._head_norm, k_norm=self._head_norm, norm_eps=_EPS,
            )  # fmt: skip

        return self._moving("rope", rows, 2 * rows * heads * shape.head_dim, inputs)

    def store(self, rows: int) -> OpCase:
        shape = self._shape

        def inputs(implementation: Callable[..., Any]) -> Call:
            k, v = (self._randn(rows, shape.num_kv_heads, shape.head_dim) for _ in range(2))
            return partial(implementation, k, v, self._slots(rows), *self._pools(rows))

        num_elements = 4 * rows * shape.num_kv_heads * shape.head_dim
        return self._moving("store_kv", rows, num_elements, inputs)

    def rope_store(self, rows: int) -> OpCase:
        shape = self._shape
        heads = shape.num_q_heads + 2 * shape.num_kv_heads

        def inputs(implementation: Callable[..., Any]) -> Call:
            return partial(
                implementation, self._randn(rows, heads, shape.head_dim), shape.num_q_heads,
                shape.num_kv_heads, self._rotation(rows), self._slots(rows), *self._pools(rows),
                q_norm=self._head_norm, k_norm=self._head_norm, norm_eps=_EPS,
            )  # fmt: skip

        return self._moving("rope_store", rows, 2 * rows * heads * shape.head_dim, inputs)

    def page_indices(self, rows: int) -> OpCase:
        columns = -(-_KV_LEN // _PAGE_SIZE)
        make = partial(torch.zeros, dtype=torch.int32, device=self._device)

        def inputs(implementation: Callable[..., Any]) -> Call:
            return partial(
                implementation, make(rows, _TABLE_WIDTH), torch.arange(rows, device=self._device),
                make(rows) + _KV_LEN, _PAGE_SIZE, make(rows + 1), make(rows * columns), make(rows),
            )  # fmt: skip

        moved = 2 * rows * columns * torch.int32.itemsize
        return OpCase(
            op="page_indices", label="", rows=rows, kind="bytes", amount=moved, bytes_each=moved,
            inputs=inputs,
        )  # fmt: skip

    def sample(self, rows: int) -> OpCase:
        def inputs(implementation: Callable[..., Any]) -> Call:
            logits = self._randn(rows, self._shape.vocab)
            return partial(implementation, logits, self._float(rows, 0.6), *self._noise(rows))

        return self._moving("sample_gumbel", rows, rows * self._shape.vocab, inputs)

    def sample_filtered(self, rows: int) -> OpCase:
        def inputs(implementation: Callable[..., Any]) -> Call:
            logits = self._randn(rows, self._shape.vocab)
            top_k = torch.full((rows,), 50, device=self._device)
            filters = top_k, self._float(rows, 0.9), self._float(rows, 0.0)
            noise = self._noise(rows)
            return partial(implementation, logits, self._float(rows, 0.6), *filters, *noise)

        return self._moving("sample_filtered", rows, rows * self._shape.vocab, inputs)

    def products(self) -> list[tuple[str, int, int]]:
        """Return label, input and output width of each projection."""
        shape = self._shape
        q_width = shape.num_q_heads * shape.head_dim
        kv_width = shape.num_kv_heads * shape.head_dim
        return [
            ("qkv", shape.hidden, q_width + 2 * kv_width),
            ("o", q_width, shape.hidden),
            ("gate_up", shape.hidden, 2 * shape.intermediate),
            ("down", shape.intermediate, shape.hidden),
            ("head", shape.hidden, shape.vocab),
        ]

    def linear(self, rows: int, label: str, inner: int, outer: int) -> OpCase:
        def inputs(implementation: Callable[..., Any]) -> Call:
            x, weight = self._randn(rows, inner), self._randn(outer, inner)
            return partial(implementation, x, weight, None)

        return self._product("linear", label, (rows, inner, outer), inputs)

    def fused(self, rows: int, label: str, inner: int, outer: int) -> OpCase:
        """The same product with what a layer does before and behind it."""
        op = _FUSED[label]

        def inputs(implementation: Callable[..., Any]) -> Call:
            x, weight = self._randn(rows, inner), self._randn(outer, inner)
            if op == "linear_parts":
                return partial(implementation, x, weight, None)
            more = {"gelu": False} if op == "add_norm_gated" else {}
            residual = self._randn(rows, inner)
            return partial(implementation, x, residual, self._weight, _EPS, weight, None, **more)

        return self._product(op, label, (rows, inner, outer), inputs)

    def _product(
        self,
        op: str,
        label: str,
        sizes: tuple[int, int, int],
        inputs: Callable[[Callable[..., Any]], Call],
    ) -> OpCase:
        rows, inner, outer = sizes
        moved = (rows * inner + inner * outer + rows * outer) * self._item
        flops = 2 * rows * inner * outer
        # A few rows only wait for the weights; many keep the multipliers busy.
        few = rows <= 128
        return OpCase(
            op=op,
            label=label,
            rows=rows,
            kind="bytes" if few else "flops",
            amount=moved if few else flops,
            bytes_each=moved,
            inputs=inputs,
        )

    def _rotation(self, rows: int) -> Rotation:
        positions = torch.arange(rows, device=self._device) % _MOST_POSITIONS
        rotation = Rotation(positions, self._cos_sin)
        _ = rotation.rows  # shared by all layers of a launch, so not part of this one's time
        return rotation

    def _float(self, rows: int, value: float) -> torch.Tensor:
        return torch.full((rows,), value, dtype=torch.float32, device=self._device)

    def _noise(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return seeds and positions, int64 ``[rows]``."""
        seeds = torch.arange(rows, device=self._device)
        return seeds, torch.full_like(seeds, _KV_LEN)

    def _slots(self, rows: int) -> torch.Tensor:
        return torch.randperm(2 * rows, device=self._device)[:rows]

    def _pools(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (2 * rows, self._shape.num_kv_heads, self._shape.head_dim)
        return self._randn(*shape), self._randn(*shape)

    def _moving(
        self, op: str, rows: int, num_elements: int, inputs: Callable[[Callable[..., Any]], Call]
    ) -> OpCase:
        """Return the case of an operation that only moves memory."""
        moved = num_elements * self._item
        return OpCase(
            op=op, label="", rows=rows, kind="bytes", amount=moved, bytes_each=moved, inputs=inputs
        )
