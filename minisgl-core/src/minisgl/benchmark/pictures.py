"""Whether pictures can be drawn here: matplotlib is optional."""

from minisgl.errors import SettingsError


def check_matplotlib(flag: str) -> None:
    """Refuse to plot where matplotlib is missing.

    Args:
        flag: what asks for a picture.

    Raises:
        SettingsError: it is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise SettingsError(
            f"{flag} needs matplotlib, which is not installed; "
            "type: pip install 'minisgl-core[bench]'"
        ) from error
    mpl.use("agg")
