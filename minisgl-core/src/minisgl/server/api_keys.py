"""The keys that requests may carry, from settings and from a file."""

from collections.abc import Sequence

from minisgl.errors import SettingsError
from minisgl.settings import ServerSettings


def read_api_keys(settings: ServerSettings) -> Sequence[str]:
    """Return every key that requests may carry; none means that they need none.

    Raises:
        SettingsError: the file cannot be read or holds none, or a key cannot be sent in a header.
    """
    keys = [key.get_secret_value() for key in settings.api_key]
    path = settings.api_key_file
    if path is not None:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise SettingsError(
                f"server.api_key_file={str(path)!r} cannot be read: {reason}"
            ) from error
        found = [line.strip() for line in lines if line.strip() and line.strip()[0] != "#"]
        if not found:
            raise SettingsError(
                f"server.api_key_file={str(path)!r} holds no key: write one a line, or leave the "
                "setting out"
            )
        keys += found
    for number, key in enumerate(keys, 1):
        if not key or not all("!" <= character <= "~" for character in key):
            raise SettingsError(
                f"key {number} of server.api_key and server.api_key_file cannot be sent in a "
                "header: keys are printable ASCII characters without spaces"
            )
    return keys
