"""The options with which JSON schemas become grammars. The scheduler and the gateway both use them."""

from typing import Any

WHITESPACE = r"\x20|\r?\n[\x20\t]{0,64}"
"""White space between two tokens of JSON, if there is any: a space, or a line end and an indentation. A model that is
free to write more can do so without end."""

JSON_OPTIONS: dict[str, Any] = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": WHITESPACE,
    "coerce_one_of": False,
    "lenient": False,
    # Without \u: llguidance compares names as they are written, so {"\u0061": 5} would escape the schema of "a".
    "json_allowed_escapes": 'nrbtf\\"',
    "json_allow_general_unicode_escapes": False,
}
"""Options of llguidance. All are given, so that `x-guidance` in a client's schema changes none of them."""
