"""The few HTTP calls that supervision needs."""

from __future__ import annotations

import http
import http.client
import json
import re
from dataclasses import dataclass
from typing import Any

PROBE = {"id": "health", "text_input": "ping", "max_tokens": 1, "apply_chat_template": False}


class ApiError(RuntimeError):
    """A call failed.

    `dead_model` names the model whose process is gone, if that is why; `busy` says that the
    server takes no more requests for now.
    """

    def __init__(self, message: str, *, timed_out: bool = False, status: int = 0) -> None:
        super().__init__(message)
        self.timed_out = timed_out
        self.busy = status == http.HTTPStatus.SERVICE_UNAVAILABLE
        found = re.search(r"Stub process '(.+)_\d+_\d+' is not healthy", message)
        self.dead_model = found[1] if found else None


@dataclass(frozen=True, slots=True)
class ServerApi:
    """HTTP client of one server. `admin_key` opens its restricted calls."""

    host: str
    port: int
    metrics_port: int
    admin_key: str

    def ready(self) -> bool:
        """Whether server and models say that they are ready. A dead model process stays so.

        False for another server that took the port at the same time: it does not know our key.
        """
        try:
            self._call("GET", "/v2/health/ready", timeout_s=2.0)
            self._call("POST", "/v2/repository/index", timeout_s=2.0, body={})
        except ApiError:
            return False
        return True

    def probe(self, model: str, timeout_s: float) -> None:
        """Ask `model` for one token.

        Raises:
            ApiError: it gave none.
        """
        answer = self._call("POST", f"/v2/models/{model}/generate", timeout_s, PROBE)
        if "text_output" not in json.loads(answer or b"{}"):
            raise ApiError(f"{model} answered {answer[:200]!r} without text_output")

    def load(self, model: str, timeout_s: float) -> None:
        """(Re)load a model; the server does so only when its files have changed.

        Raises:
            ApiError: the model did not load.
        """
        self._call("POST", f"/v2/repository/models/{model}/load", timeout_s, {})

    def steps(self) -> float | None:
        """Steps that the engine has run; None if the server does not say."""
        try:
            text = self._call("GET", "/metrics", 2.0, port=self.metrics_port).decode()
        except ApiError:
            return None
        found = re.search(
            r'(?m)^nv_trt_llm_general_metrics\{.*"iteration_counter".*\} (\S+)$', text
        )
        return float(found[1]) if found else None

    def _call(
        self,
        method: str,
        path: str,
        timeout_s: float,
        body: dict[str, Any] | None = None,
        port: int | None = None,
    ) -> bytes:
        connection = http.client.HTTPConnection(self.host, port or self.port, timeout=timeout_s)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {"admin-key": self.admin_key})
            response = connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException) as error:
            timed_out = isinstance(error, TimeoutError)
            message = f"{method} {path}: {error or type(error).__name__}"
            raise ApiError(message, timed_out=timed_out) from error
        finally:
            connection.close()
        if response.status != 200:
            text = answer.decode(errors="replace").strip()
            raise ApiError(f"{method} {path}: {response.status} {text}", status=response.status)
        return answer
