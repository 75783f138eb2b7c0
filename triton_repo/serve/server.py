"""One run of `tritonserver`: start, readiness, stop, and nothing left behind."""

from __future__ import annotations

import json
import logging
import os
import secrets
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from m3trt.serve.api import ServerApi
from m3trt.serve.binary import (
    ServeError,
    backend_flags,
    check_path,
    check_stub,
    model_environment,
)
from m3trt.serve.ports import Ports
from m3trt.serve.processes import (
    end_with_parent,
    group_members,
    is_member,
    kill_group,
    limit_stack,
    model_processes,
    reap,
    remove_shared_memory,
)

logger = logging.getLogger(__name__)

ENTRIES = ("ensemble", "tensorrt_llm_bls")
"""Models that clients call. The ensemble loads its steps, and so those of the BLS model."""

EXIT_TIMEOUT_S = 5
TAIL_BYTES = 1 << 16
STACK_BYTES = 1 << 28
"""Its HTTP threads parse JSON recursively and copy form bodies (what curl -d and urllib send unless
told otherwise) to their stacks: with the usual 8 MB, 5 MB of body or deep JSON kill the server."""

DEAD_GRACE_S = 5.0
"""How long a starting server may take to report a model process that ended."""

_RESTRICTED = "model-repository,shared-memory,trace,logging"


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What does not change between restarts. `run_dir` holds `repository/` and the log."""

    tritonserver: Path
    run_dir: Path
    address: str
    ports: Ports
    ready_timeout_s: float
    extra_flags: tuple[str, ...] = ()
    admin_key: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def repository(self) -> Path:
        return self.run_dir / "repository"

    @property
    def log(self) -> Path:
        return self.run_dir / "tritonserver.log"

    @property
    def addresses(self) -> dict[str, str]:
        """`host:port` by which clients on this machine reach each service."""
        host = f"[{self.api.host}]" if ":" in self.api.host else self.api.host
        ports = {"http": self.ports.http, "grpc": self.ports.grpc, "metrics": self.ports.metrics}
        return {service: f"{host}:{port}" for service, port in ports.items()}

    @property
    def api(self) -> ServerApi:
        local = {"0.0.0.0": "127.0.0.1", "::": "::1"}
        host = local.get(self.address, self.address)
        return ServerApi(host, self.ports.http, self.ports.metrics, self.admin_key)


def _prepare() -> None:
    """In the new child, before it becomes the server."""
    end_with_parent()
    limit_stack(STACK_BYTES)


class TritonServer:
    """The server process and its model processes, in a session of their own."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self._shm_prefix = f"m3trt_{os.getpid()}_"
        self._process: subprocess.Popen[bytes] | None = None
        self._models: dict[int, str] = {}
        self._dead_since: float | None = None

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process; does not wait for it.

        Raises:
            ServeError: it cannot be started.
        """
        check_path("--run_dir", self.options.run_dir, shell=True)
        check_path("--tritonserver", self.options.tritonserver, shell=True)
        command = self._command()
        check_stub(self.options.tritonserver)
        self._dead_since = None
        with self.options.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=model_environment(),
                start_new_session=True,
                preexec_fn=_prepare,
            )

    def exit_code(self) -> int | None:
        """None while the server process runs."""
        return -1 if self._process is None else self._process.poll()

    def check_ready(self) -> bool:
        """Whether server and models say that they are ready.

        Raises:
            ServeError: the process ended, or one of a model did so and the server does not tell.
        """
        code = self.exit_code()
        if code is not None:
            raise ServeError(
                f"tritonserver ended with code {code} before it was ready{self.tail()}"
            )
        dead = group_members(self.pid, "Z")
        if not dead:
            return self.options.api.ready()
        self._dead_since = self._dead_since or time.monotonic()
        if time.monotonic() - self._dead_since > DEAD_GRACE_S:
            raise ServeError(
                f"model process {dead[0]} ended before the server was ready; if something killed"
                f" it, look for a lack of memory{self.tail()}"
            )
        return False

    def find_processes(self) -> None:
        """Look up the model processes that `missing_models` is to watch."""
        self._models = model_processes(self.pid, self.options.repository)

    def write_state(self) -> None:
        """Write `server.json` in the run directory: who serves where, for this user's eyes only."""
        state = {
            "pid": str(self.pid),
            "supervisor": str(os.getpid()),
            **self.options.addresses,
            "admin_key": self.options.admin_key,
        }
        file = self.options.run_dir / "server.json"
        new = file.with_suffix(".new")
        new.touch(mode=0o600)
        new.write_text(json.dumps(state, indent=2) + "\n")
        new.replace(file)

    def missing_models(self, expected: Sequence[str]) -> list[str]:
        """Models of `expected` without a living process."""
        complete = len(self._models) == len(expected)
        if complete and all(is_member(pid, self.pid) for pid in self._models):
            return []
        self.find_processes()
        return sorted(set(expected) - set(self._models.values()))

    def reload(self, model: str, timeout_s: float) -> None:
        """Start a new process for `model` in the running server.

        Raises:
            ApiError: it did not load.
        """
        (self.options.repository / model / "1" / "model.py").touch()
        self.options.api.load(model, timeout_s)

    def stop(self, graceful: bool = True) -> None:
        """End the server, its model processes and its shared memory."""
        if self._process is None:
            return
        if graceful and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(EXIT_TIMEOUT_S + 3)
            except subprocess.TimeoutExpired:
                logger.warning("the server did not stop in %d s: killing it", EXIT_TIMEOUT_S + 3)
        kill_group(self.pid)
        self._process.wait()
        reap(self.pid)
        self._process = None
        if left := remove_shared_memory(self._shm_prefix):
            logger.info("removed %d shared-memory files that the server left", len(left))

    def kill(self) -> None:
        """End everything at once, without waiting for requests."""
        self.stop(graceful=False)

    def tail(self, lines: int = 15) -> str:
        """The end of the server's log, for an error message."""
        try:
            with self.options.log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
                text = log.read().decode(errors="replace")
        except OSError:
            return ""
        return "\n".join([f"; the end of {self.options.log}:", *text.splitlines()[-lines:]])

    def _command(self) -> list[str]:
        options, ports = self.options, self.options.ports
        command = [
            str(options.tritonserver),
            f"--model-repository={options.repository}",
            *backend_flags(options.tritonserver),
            f"--backend-config=python,shm-region-prefix-name={self._shm_prefix}",
            f"--exit-timeout-secs={EXIT_TIMEOUT_S}",
            "--disable-auto-complete-config",
            "--model-control-mode=explicit",
            *(f"--load-model={model}" for model in ENTRIES),
            f"--http-restricted-api={_RESTRICTED}:admin-key={options.admin_key}",
            f"--grpc-restricted-protocol={_RESTRICTED}:admin-key={options.admin_key}",
        ]
        for service in ("http", "grpc", "metrics"):
            command.append(f"--{service}-address={options.address}")
            command.append(f"--{service}-port={getattr(ports, service)}")
        if not Path("/dev/nvidiactl").exists():
            command.append("--allow-gpu-metrics=false")
        return [*command, *options.extra_flags]
