"""How products are cut, by number of tokens: tuned ones from files, or a rule of thumb.

A tuned file belongs to one ``Key``. Those in the user's folder come before those that are shipped.
Imports no torch.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from minisgl.errors import SettingsError

TOKENS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Numbers of tokens that are tuned; another number takes the next larger one's launch."""

_FEW_OF: Final = 4
"""Up to one assignment for so many experts the rule of thumb does not sort: few share one."""

_LEAST_ROWS, _MOST_ROWS = 16, 128

_ANEW: Final = "Delete it, or write it anew with: minisgl tune moe --model MODEL"


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def _power_of_2(number: int) -> int:
    if number & (number - 1):
        raise ValueError("must be a power of 2")
    return number


Side = Annotated[int, AfterValidator(_power_of_2)]
"""Of a tile: Triton knows no others."""


class Tile(_Model):
    """How a grouped product is cut.

    Attributes:
        outputs, inputs: of the weights in a tile.
        group: tiles of rows that are done before the next outputs.
        stages: of the software pipeline.
        warps: of a program.
        swapped: the weights are the first operand.
        tma: weights, and sorted rows, are copied by the tensor memory accelerator (9.0).
    """

    outputs: Side = Field(ge=16)
    inputs: Side = Field(ge=16)
    group: int = Field(ge=1)
    stages: int = Field(ge=1)
    warps: Literal[1, 2, 4, 8, 16]
    swapped: bool
    tma: bool = False


class Columns(_Model):
    """How a product for few tokens is cut: outputs of a program, inputs at once, warps."""

    outputs: Side = Field(ge=1)
    inputs: Side = Field(ge=1)
    warps: Literal[1, 2, 4, 8, 16]


class Few(_Model):
    """A launch without sorting."""

    kind: Literal["few"] = "few"
    tokens: int = Field(ge=1)
    gate_up: Columns
    down: Columns


class Grouped(_Model):
    """A launch of sorted tokens, in tiles of ``rows`` of one expert."""

    kind: Literal["grouped"] = "grouped"
    tokens: int = Field(ge=1)
    rows: Side = Field(ge=16)
    gate_up: Tile
    down: Tile


Launch = Few | Grouped


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What a tuned file is for.

    Attributes:
        experts, inner, hidden: sizes of a layer on one rank.
        dtype: of the weights, such as ``bfloat16``; ``float8_e4m3fn`` with tokens of any dtype.
        device: name of the GPU.
        triton: version, ``major.minor``: another one compiles other code.
    """

    experts: int
    inner: int
    hidden: int
    dtype: str
    device: str
    triton: str

    @property
    def item(self) -> int:
        """Bytes of a weight."""
        return 1 if self.dtype.startswith("float8") else 2

    @property
    def file_name(self) -> str:
        """Name of the file with the launches for this key."""
        device = "".join(c if c.isalnum() else "-" for c in self.device)
        return (
            f"experts-{self.experts}_inner-{self.inner}_hidden-{self.hidden}_{self.dtype}_{device}_"
            f"triton-{self.triton}.json"
        )


class TunedFile(_Model):
    """What a tuned file holds.

    Attributes:
        source: where and when it was measured, for people.
        launches: one a tuned number of tokens, ascending.
    """

    source: str = ""
    launches: tuple[Annotated[Launch, Field(discriminator="kind")], ...] = Field(min_length=1)


def user_folder() -> Path:
    """Return where tuned files are by default: below ``XDG_CONFIG_HOME``, or ``~/.config``."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "minisgl" / "moe-triton"


def find_tuned(key: Key, folder: Path | None = None) -> TunedFile | None:
    """Return the tuned file for ``key``, the user's before the shipped one, or ``None``.

    Args:
        key: what is run.
        folder: the user's files; by default ``user_folder()``.

    Raises:
        SettingsError: a file that is no tuned file, or that cannot be read.
    """
    own = read_own(key, folder or user_folder())
    if own is not None:
        return own
    shipped = resources.files("minisgl_moe_triton").joinpath("tuned", key.file_name)
    return _parse(shipped.read_bytes(), str(shipped)) if shipped.is_file() else None


def read_own(key: Key, folder: Path) -> TunedFile | None:
    """Return the file for ``key`` in ``folder``, ``None`` if there is none.

    Raises:
        SettingsError: as ``find_tuned``.
    """
    file = folder / key.file_name
    try:
        contents = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise SettingsError(
            f"tuned MoE launches in {str(file)!r} cannot be read: {error.strerror}. Mend that, "
            "or name another folder with backend_options.triton.tuned_folder"
        ) from error
    return _parse(contents, str(file))


def check_folder(folder: Path, setting: str) -> None:
    """Make the folder and try to write there, before a search whose results would be lost.

    Raises:
        SettingsError: it cannot be made or written to; names the setting and the folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise SettingsError(
            f"{setting} {str(folder)!r} cannot be written to: {error.strerror}. Name another "
            "folder with --folder"
        ) from error


def write_tuned(key: Key, tuned: TunedFile, folder: Path) -> Path:
    """Write ``tuned`` for ``key`` into ``folder`` and return the file.

    It is written beside its place and renamed: a start may read it meanwhile.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / key.file_name
    text = json.dumps(tuned.model_dump(), indent=1)
    partial = file.with_suffix(f".{os.getpid()}.partial")
    try:
        partial.write_text(f"{text}\n", encoding="utf-8")
        partial.replace(file.resolve())  # what a link leads to is replaced, not the link
    finally:
        partial.unlink(missing_ok=True)
    return file


def choose(launches: Sequence[Launch], tokens: int) -> Launch:
    """Return the launch of the next larger number of tokens, or of the largest."""
    return next((launch for launch in launches if launch.tokens >= tokens), launches[-1])


def shared_bytes(tile: Tile, rows: int, *, gated: bool, item: int = 2) -> int:
    """Return the shared memory of a program: tiles of both operands for each stage.

    Args:
        tile: how the product is cut.
        rows: of a tile.
        gated: two products at once.
        item: bytes of an element.
    """
    return tile.stages * tile.inputs * (tile.outputs * (1 + gated) + rows) * item


def rule_of_thumb(key: Key, top_k: int, shared: int) -> tuple[Launch, ...]:
    """Return launches for a key that nobody tuned.

    Args:
        key: sizes of a layer.
        top_k: experts a token.
        shared: bytes of shared memory that a program of the device can have.
    """
    return tuple(_guess(key, top_k, tokens, shared) for tokens in TOKENS)


def _guess(key: Key, top_k: int, tokens: int, shared: int) -> Launch:
    if tokens == 1 or tokens * top_k <= key.experts // _FEW_OF:
        return Few(
            tokens=tokens,
            gate_up=Columns(outputs=4, inputs=2048, warps=8),
            down=Columns(outputs=4 if top_k <= 8 else 2, inputs=512, warps=8),
        )
    mean = tokens * top_k / key.experts
    rows = _LEAST_ROWS
    while rows < min(1.5 * mean, _MOST_ROWS):
        rows *= 2
    inputs = 128 // key.item  # what a tensor core takes from a row at once
    # The sums of products of fp8 are kept beside those in float32: twice the registers for each.
    widest = 128 if key.item == 1 else 256
    if rows < 64:  # small tiles, so that several programs read on a multiprocessor at once
        gated = Tile(outputs=64, inputs=inputs, group=1, stages=4, warps=4, swapped=True)
        plain = Tile(outputs=128, inputs=inputs, group=1, stages=4, warps=4, swapped=True)
    elif rows == 64:
        gated = Tile(outputs=64, inputs=inputs, group=8, stages=3, warps=4, swapped=False)
        plain = Tile(outputs=128, inputs=inputs, group=8, stages=3, warps=4, swapped=False)
    else:
        gated = Tile(outputs=128, inputs=inputs, group=16, stages=4, warps=8, swapped=False)
        plain = Tile(outputs=widest, inputs=inputs, group=16, stages=4, warps=8, swapped=False)
    return Grouped(
        tokens=tokens,
        rows=rows,
        gate_up=_fitting(gated, rows, shared, gated=True, item=key.item),
        down=_fitting(plain, rows, shared, gated=False, item=key.item),
    )


def _fitting(tile: Tile, rows: int, shared: int, *, gated: bool, item: int) -> Tile:
    """Return ``tile`` with so few stages, then inputs, that it fits."""
    while shared_bytes(tile, rows, gated=gated, item=item) > shared:
        if tile.stages > 2:
            tile = tile.model_copy(update={"stages": tile.stages - 1})
        elif tile.inputs > 32 // item:
            tile = tile.model_copy(update={"inputs": tile.inputs // 2})
        else:
            break
    return tile


def _parse(contents: bytes, name: str) -> TunedFile:
    try:
        tuned = TunedFile.model_validate_json(contents)
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(map(str, fault["loc"]))
        what = f"{place}={fault['input']!r:.60}: {fault['msg']}" if place else fault["msg"]
        raise SettingsError(
            f"{name!r} is no file of tuned MoE launches: {what}. {_ANEW}"
        ) from error
    ascending = sorted(tuned.launches, key=lambda launch: launch.tokens)
    return tuned.model_copy(update={"launches": tuple(ascending)})
