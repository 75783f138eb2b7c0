"""Lets Ctrl-C, SIGTERM and a lost terminal end a command through its exception handlers, which
remove what is half written."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
EXIT_CODE = 128 + signal.SIGINT

_shields = 0
_waiting = False


@contextmanager
def interruptible() -> Iterator[None]:
    """Every signal raises KeyboardInterrupt; only for the main thread.

    A signal that the caller of this program had ignored (nohup) stays ignored.
    """
    global _waiting
    heard = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, _interrupt) for number in heard}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        _waiting = False


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Inside, signals wait: an impatient second Ctrl-C must not disturb the cleaning up."""
    global _shields
    _shields += 1
    try:
        yield
    finally:
        _shields -= 1
    if _waiting and not _shields:
        raise KeyboardInterrupt


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _waiting
    _waiting = True
    if not _shields:
        raise KeyboardInterrupt
