"""The one error type that a request's author sees."""

from __future__ import annotations


class PreprocessError(ValueError):
    """The request cannot be preprocessed; the message says why and is meant for its author."""
