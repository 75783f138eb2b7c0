"""The converter's own error."""

from __future__ import annotations


class ConvertError(ValueError):
    """A checkpoint cannot be converted; the message says what was found, expected and where."""


def listed(items: list[str], limit: int = 8) -> str:
    """The first few of `items` and how many more there are."""
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return "; ".join(items[:limit]) + more
