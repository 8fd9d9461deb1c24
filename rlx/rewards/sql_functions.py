"""The functions of sqlite's that a query may call, and those of them that could take seconds in a
single call, written so that none can.

Nothing can stop a call. `instr`, `replace` and `trim` with a set of characters take time that grows
with the product of two lengths, and `printf` repeats a character as often as it is told. These give
what sqlite's give. https://www.sqlite.org/lang_corefunc.html
"""

import re
import sqlite3

_NAMES = """
-> ->> abs acos acosh asin asinh atan atan2 atanh avg ceil ceiling char coalesce concat concat_ws
cos cosh count cume_dist current_date current_time current_timestamp date datetime degrees
dense_rank exp first_value floor format glob group_concat hex if ifnull iif instr json
json_array_length json_extract json_type json_valid julianday lag last_value lead length like
likelihood likely ln log log10 log2 lower ltrim max median min mod nth_value ntile nullif
octet_length percent_rank pi pow power printf quote radians rank replace round row_number rtrim
sign sin sinh sqrt strftime string_agg substr substring sum tan tanh time timediff total trim
trunc typeof unhex unicode unixepoch unlikely upper
"""
FUNCTIONS = frozenset(_NAMES.split())
"""They give the same for the same, but for the clock's; none writes, or makes much of nothing."""

Value = None | int | float | str | bytes

MAX_REPLACED_CHARACTERS = 100_000


def as_text(value: Value) -> str:
    """What sqlite makes of a value where it wants text."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if not isinstance(value, float):
        return str(value)
    if value in (float("inf"), float("-inf")):
        return "Inf" if value > 0 else "-Inf"
    mantissa, e, exponent = format(value, ".15g").partition("e")
    return (mantissa if "." in mantissa else mantissa + ".0") + e + exponent


def instr(text: Value, part: Value) -> int | None:
    if text is None or part is None:
        return None
    if isinstance(text, bytes) and isinstance(part, bytes):
        return text.find(part) + 1
    return as_text(text).find(as_text(part)) + 1


def replace(text: Value, part: Value, other: Value) -> Value:
    if text is None or part is None or other is None:
        return None
    whole, old, new = as_text(text), as_text(part), as_text(other)
    if not old:
        return text
    if len(whole) + whole.count(old) * (len(new) - len(old)) > MAX_REPLACED_CHARACTERS:
        raise OverflowError("the text would be too long")
    return whole.replace(old, new)


def ltrim(text: Value, characters: Value = " ") -> str | None:
    return _trimmed(text, characters, left=True, right=False)


def rtrim(text: Value, characters: Value = " ") -> str | None:
    return _trimmed(text, characters, left=False, right=True)


def trim(text: Value, characters: Value = " ") -> str | None:
    return _trimmed(text, characters, left=True, right=True)


def _trimmed(text: Value, characters: Value, *, left: bool, right: bool) -> str | None:
    if text is None or characters is None:
        return None
    # not str.strip, which looks through the characters again for each place
    whole, cut = as_text(text), frozenset(as_text(characters))
    start, end = 0, len(whole)
    while left and start < end and whole[start] in cut:
        start += 1
    while right and start < end and whole[end - 1] in cut:
        end -= 1
    return whole[start:end]


_FIELD = re.compile(r"%(?:%|[-+ #!,0-9.*]*)")
_WIDE = re.compile(r"\d{4}|\*")


def printf(text: Value = None, *values: Value) -> str | None:
    """sqlite's own, for widths and precisions below 1,000 that stand in the format."""
    if text is not None and any(map(_WIDE.search, _FIELD.findall(as_text(text)))):
        raise OverflowError("a width or precision is too large")
    connection = sqlite3.connect(":memory:")
    try:
        marks = ", ".join("?" * (len(values) + 1))
        return connection.execute(f"SELECT printf({marks})", (text, *values)).fetchone()[0]
    finally:
        connection.close()


REPLACED = {
    ("instr", 2): instr,
    ("replace", 3): replace,
    ("ltrim", 2): ltrim,
    ("rtrim", 2): rtrim,
    ("trim", 2): trim,
    ("printf", -1): printf,
    ("format", -1): printf,
}
"""By name and number of arguments, -1 for any; the others of the name stay sqlite's own."""
