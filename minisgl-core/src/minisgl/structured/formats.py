"""Formats of strings in JSON schemas that XGrammar would take too widely, as patterns.

XGrammar's dates have a 31st of February, its addresses octets such as ``007``, which Python's
``ipaddress`` refuses, and its times a leap second every minute. Dates are of the years 1 to 9999.
"""

from typing import Final

_YEAR: Final = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR: Final = (
    "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
)
_DAY_OF_ANY_MONTH: Final = "(?:0[1-9]|1[0-9]|2[0-8])"
_DATE: Final = (
    rf"(?:{_YEAR}-(?:(?:0[1-9]|1[0-2])-{_DAY_OF_ANY_MONTH}"
    r"|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
    rf"|{_LEAP_YEAR}-02-29)"
)
_HOUR_AND_MINUTE: Final = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME: Final = rf"{_HOUR_AND_MINUTE}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_HOUR_AND_MINUTE})"
_OCTET: Final = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL: Final = "[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"

PATTERNS: Final = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "ipv4": rf"{_OCTET}(?:\.{_OCTET}){{3}}",
    "hostname": rf"{_LABEL}(?:\.{_LABEL}){{0,3}}",
}
"""By the format's name; each pattern is of all engines alike."""
