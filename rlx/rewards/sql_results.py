"""Whether the rows of a query are those of an answer, as far as the answer determines them.

An answer is a list of groups of rows: the order of the groups is determined, the order of the rows
within one is not. Without an ORDER BY all rows are one group; with it, rows with equal keys are a
group. A LIMIT keeps some places of this list, and may cut a group: any rows of the group may then
stand in the places that are left of it. The same row twice is two rows.

Values are equal as sqlite has them: NULL is NULL here, 1 is 1.0 and not '1', a text is no blob. Two
numbers of which one is a float are equal within a relative tolerance. No JAX.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

Row = tuple

MAX_PAIRED = 200
"""More rows than these that differ only within the tolerance, in several columns, are refused."""
MAX_ORDERS = 500
"""Beginnings of orders of columns that are tried."""
MAX_COMPARED = 1_000_000
"""Of a result with more values than these, times its columns, no other order is tried."""
SMALLEST = 1e-12
"""Floats nearer to each other than this are equal."""


class Answer(NamedTuple):
    columns: int
    groups: tuple[tuple[Row, ...], ...]
    start: int
    """Places of the list that are left out before the first."""
    count: int
    """Places that are kept."""

    def mismatch(self, rows: Sequence[Row], columns: int, *, tolerance: float, order: bool) -> str:
        """Why the rows are not this answer; empty if they are. `order`: of the columns."""
        if columns != self.columns:
            return f"the result has {columns} columns, not {self.columns}"
        if len(rows) != self.count:
            return f"the result has {len(rows)} rows, not {self.count}"
        if self._accepts(rows, tolerance):
            return ""
        if not order and columns > 1 and self._accepts_reordered(rows, tolerance):
            return ""
        if len(self.groups) > 1 and self._unordered()._accepts(rows, tolerance):
            return "the rows are right and their order is not"
        return "the rows are not those of the right result"

    def _accepts(self, rows: Sequence[Row], tolerance: float) -> bool:
        place, taken = 0, 0
        for group in self.groups:
            first = max(self.start - place, 0)
            place += len(group)
            size = min(len(group) - first, len(rows) - taken)
            if size > 0:
                if not contained(rows[taken : taken + size], group, tolerance):
                    return False
                taken += size
        return taken == len(rows)

    def _accepts_reordered(self, rows: Sequence[Row], tolerance: float) -> bool:
        if self.columns**2 * len(rows) > MAX_COMPARED:
            return False
        wanted = [row for group in self.groups for row in group]
        given = [tuple(row[column] for row in rows) for column in range(self.columns)]
        fits = []  # for each place the columns of `rows` that may stand there
        for place in range(self.columns):
            pool = [(row[place],) for row in wanted]
            fits.append(
                [
                    column
                    for column in range(self.columns)
                    if contained([(value,) for value in given[column]], pool, tolerance)
                ]
            )
        visits = MAX_ORDERS

        def accepts(chosen: tuple[int, ...]) -> bool:
            nonlocal visits
            visits -= 1
            if visits < 0:
                return False
            if len(chosen) == self.columns:
                return self._accepts([tuple(row[c] for c in chosen) for row in rows], tolerance)
            left = [column for column in fits[len(chosen)] if column not in chosen]
            # of columns that are equal to each other one is as good as another
            different = {given[column]: column for column in reversed(left)}
            return any(accepts((*chosen, column)) for column in different.values())

        return all(fits) and accepts(())

    def _unordered(self) -> "Answer":
        return self._replace(groups=(tuple(row for group in self.groups for row in group),))


def contained(rows: Sequence[Row], pool: Sequence[Row], tolerance: float) -> bool:
    """Whether each row has an equal one of its own in the pool."""
    left = Counter(pool)
    left.subtract(rows)
    missing = [row for row, count in left.items() for _ in range(-count)]
    if not missing:
        return True
    spare = [row for row, count in left.items() for _ in range(count)]
    if not any(isinstance(value, float) for row in (*missing, *spare) for value in row):
        return False
    return all(
        _paired(part, spare_part, tolerance)
        for part, spare_part in _by_other_values(missing, spare)
    )


def _by_other_values(missing: list[Row], spare: list[Row]) -> list[tuple[list[Row], list[Row]]]:
    """Both cut into parts that agree in all that is no number."""
    parts: dict[Row, tuple[list[Row], list[Row]]] = {}
    for side, rows in enumerate((missing, spare)):
        for row in rows:
            # a text, so that no value of the data is taken for a number's mark
            key = tuple("number" if _is_number(v) else (type(v).__name__, v) for v in row)
            parts.setdefault(key, ([], []))[side].append(row)
    return list(parts.values())


def _paired(missing: list[Row], spare: list[Row], tolerance: float) -> bool:
    if len(missing) > len(spare):
        return False
    if len(missing) == len(spare):
        # with one column of numbers this finds the pairs if there are any
        ordered = zip(sorted(missing, key=_numbers), sorted(spare, key=_numbers), strict=True)
        if all(_close(a, b, tolerance) for a, b in ordered):
            return True
    if len(missing) > MAX_PAIRED or len(spare) > MAX_PAIRED:
        return False
    partner: dict[int, int] = {}
    return all(_find(i, missing, spare, tolerance, partner, set()) for i in range(len(missing)))


def _find(
    i: int, missing: list[Row], spare: list[Row], tolerance: float, partner: dict, tried: set
) -> bool:
    """A partner in `spare` for row i, others moved on where they can be."""
    for j, row in enumerate(spare):
        if j not in tried and _close(missing[i], row, tolerance):
            tried.add(j)
            if j not in partner or _find(partner[j], missing, spare, tolerance, partner, tried):
                partner[j] = i
                return True
    return False


def _close(one: Row, other: Row, tolerance: float) -> bool:
    return all(equal(a, b, tolerance) for a, b in zip(one, other, strict=True))


def equal(one: object, other: object, tolerance: float) -> bool:
    """Whether two values of sqlite's are the same."""
    if isinstance(one, float) != isinstance(other, float) or isinstance(one, float):
        if not (_is_number(one) and _is_number(other)):
            return False
        return one == other or (
            abs(one) < math.inf
            and abs(other) < math.inf
            and math.isclose(one, other, rel_tol=tolerance, abs_tol=SMALLEST)
        )
    return type(one) is type(other) and one == other


def _numbers(row: Row) -> list[float]:
    return [float(value) for value in row if _is_number(value)]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)
