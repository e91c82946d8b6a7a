"""Whether pictures can be drawn here: matplotlib is optional."""

from pathlib import Path
from typing import Final

from minisgl.errors import SettingsError

_KINDS: Final = (".png", ".svg", ".pdf", ".jpg")


def check_picture(flag: str, path: Path) -> None:
    """Refuse a picture that could not be drawn, before anything is measured.

    Args:
        flag: what asks for a picture.
        path: where to.

    Raises:
        SettingsError: matplotlib is not installed, or no kind of picture ends so.
    """
    if path.suffix.lower() not in _KINDS:
        raise SettingsError(f"{flag} {str(path)!r}: a picture ends with {', '.join(_KINDS)}")
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise SettingsError(
            f"{flag} needs matplotlib, which is not installed; "
            "type: pip install 'minisgl-core[bench]'"
        ) from error
    mpl.use("agg")
