"""A response sender that cannot crash the server."""

from __future__ import annotations

import threading
from typing import Any

FINAL = 1
"""TRITONSERVER_RESPONSE_COMPLETE_FINAL."""


class SafeSender:
    """Wraps Triton's response sender: FINAL is sent exactly once, and nothing follows it.

    The server dies when `is_cancelled` is called after FINAL, and a request without FINAL never
    ends. Safe to use from several threads.
    """

    def __init__(self, sender: Any) -> None:
        self._sender = sender
        self._lock = threading.Lock()

    def send(self, response: Any, *, final: bool = False) -> bool:
        """Send `response`, with `final` as the last one. False if the end was sent before."""
        with self._lock:
            sender = self._sender
            if sender is None:
                return False
            if not final:
                sender.send(response)
                return True
            self._sender = None
            try:
                sender.send(response, flags=FINAL)
            except Exception:
                sender.send(flags=FINAL)
                raise
            return True

    def finish(self) -> bool:
        """End the request without another response. False if it has ended before."""
        with self._lock:
            sender, self._sender = self._sender, None
            if sender is None:
                return False
            sender.send(flags=FINAL)
            return True

    def cancelled(self) -> bool:
        """Whether the client has given up; False once the end was sent."""
        with self._lock:
            return self._sender is not None and bool(self._sender.is_cancelled())
