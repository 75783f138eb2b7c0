"""Signals become one exception, which waits where it would do harm."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from m3trt.convert.interrupt import SIGNALS, interruptible, uninterrupted

pytestmark = pytest.mark.smoke


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_raises_at_once_and_restores_the_handlers(number: signal.Signals) -> None:
    with pytest.raises(KeyboardInterrupt), interruptible():
        os.kill(os.getpid(), number)
    assert all(signal.getsignal(each) == signal.SIG_DFL for each in SIGNALS)
    with uninterrupted():  # what was handled does not come back
        pass


@pytest.mark.parametrize("number", SIGNALS)
def test_waits_for_the_end_of_a_nested_block(number: signal.Signals) -> None:
    reached = []

    def shielded() -> None:
        with uninterrupted():
            with uninterrupted():
                os.kill(os.getpid(), number)
                reached.append("inner")
            reached.append("outer")
        reached.append("never")

    with pytest.raises(KeyboardInterrupt), interruptible():
        shielded()
    assert reached == ["inner", "outer"]


def test_what_was_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with interruptible():
        os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
