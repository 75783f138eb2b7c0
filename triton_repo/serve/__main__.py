"""Serves an engine directory with Triton and supervises the server.

python -m m3trt.serve --engine_dir ENGINE [--http_port 8000 --grpc_port 8001 --metrics_port 8002]
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from m3trt.serve.server import ServerOptions
    from m3trt.serve.supervisor import Supervisor

EXIT_FAILED = 1
EXIT_GAVE_UP = 3
CLIENT_GRACE_S = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    """0: stopped as asked; 1: could not start; 3: gave up restarting; else `--run`'s own code."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    from m3trt.serve.binary import ServeError

    try:
        return _serve(arguments)
    except (ServeError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:  # before there was anything to stop
        return 0


def _serve(arguments: argparse.Namespace) -> int:
    from m3trt.serve.binary import ServeError, check_path
    from m3trt.serve.processes import adopt_orphans
    from m3trt.serve.supervisor import Interrupted, Supervisor

    check_path("--engine_dir", arguments.engine_dir.resolve(), shell=False)
    options = _options(arguments)
    state_dir = options.run_dir / "inflight"
    state_dir.mkdir()
    processes = _write_models(arguments, options.repository, state_dir)
    adopt_orphans()
    stop = _stop_on_signals()
    supervisor = Supervisor(options, processes, state_dir, stop, arguments.probe_period)
    try:
        supervisor.start()
        addresses = _announce(options)
        try:
            return _watch(supervisor, stop, arguments.run, addresses)
        except ServeError as error:
            print(f"error: {error}", file=sys.stderr)
            return EXIT_GAVE_UP
    except Interrupted:
        return 0
    finally:
        supervisor.close()


def _options(arguments: argparse.Namespace) -> ServerOptions:
    from m3trt.serve.binary import find_tritonserver
    from m3trt.serve.ports import choose_ports
    from m3trt.serve.server import ServerOptions

    free = arguments.http_port == 0
    ports = choose_ports(
        arguments.http_address,
        arguments.http_port,
        (0 if free else 8001) if arguments.grpc_port is None else arguments.grpc_port,
        (0 if free else 8002) if arguments.metrics_port is None else arguments.metrics_port,
    )
    return ServerOptions(
        find_tritonserver(arguments.tritonserver),
        _new_run_dir(arguments.run_dir),
        arguments.http_address,
        ports,
        arguments.ready_timeout,
        tuple(arguments.server_flag),
    )


def _new_run_dir(given: Path | None) -> Path:
    if given is None:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        given = Path("out", "serve", f"{stamp}-{os.getpid()}")
    given.mkdir(parents=True, exist_ok=True)
    if any(given.iterdir()):
        raise ValueError(f"--run_dir {given} is not empty: remove it or name another")
    return given.resolve()


def _write_models(arguments: argparse.Namespace, repository: Path, state_dir: Path) -> list[str]:
    """Write the repository; returns the names of its models, each of which has one process."""
    from m3trt.build.engine_dir import EngineDir
    from m3trt.runtime.executors import choose_runtime
    from m3trt.serve.repository import write_repository
    from m3trt.serve.table import parse_settings

    # What is wrong with the engine the models would say only in their log.
    engine = EngineDir.load(arguments.engine_dir)
    engine.check_weights()
    if arguments.executor != "auto":
        choose_runtime(engine, arguments.executor)
    settings = {
        "executor": arguments.executor,
        "state_dir": str(state_dir),
        **parse_settings(arguments.set),
    }
    table = write_repository(engine, repository, settings)
    return [model.name for model in table.models]


def _stop_on_signals() -> threading.Event:
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup sets it
            signal.signal(number, lambda *_: stop.set())
    return stop


def _announce(options: ServerOptions) -> dict[str, str]:
    """Say on stdout where the server is; returns addresses by variable."""
    at = options.addresses
    print(
        f"ready: HTTP http://{at['http']}, gRPC {at['grpc']}, metrics http://{at['metrics']}/metrics\n"
        f"model repository, log and server.json: {options.run_dir}",
        flush=True,
    )
    return {
        "M3TRT_HTTP": at["http"],
        "M3TRT_GRPC": at["grpc"],
        "M3TRT_RUN_DIR": str(options.run_dir),
    }


def _watch(
    supervisor: Supervisor,
    stop: threading.Event,
    command: Sequence[str],
    addresses: Mapping[str, str],
) -> int:
    """Supervise until a signal comes, or until `command` has ended; returns its exit code."""
    if not command:
        supervisor.watch()
        return 0
    with subprocess.Popen(command, env={**os.environ, **addresses}) as client:
        try:
            supervisor.watch(until=lambda: client.poll() is not None)
        finally:
            _end(client)
    return 0 if stop.is_set() else client.returncode


def _end(client: subprocess.Popen[bytes]) -> None:
    if client.poll() is None:
        client.terminate()
        try:
            client.wait(CLIENT_GRACE_S)
        except subprocess.TimeoutExpired:
            client.kill()


def _parser() -> argparse.ArgumentParser:
    from m3trt.build.library import RUNTIMES

    parser = argparse.ArgumentParser(
        prog="python -m m3trt.serve",
        description="Serve an engine directory with Triton until Ctrl-C.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--engine_dir", type=Path, required=True, help="directory written by m3trt.build")
    add("--http_port", type=int, default=8000, help="0 takes free ports for all three services")
    add("--grpc_port", type=int, help="8001, or a free one with --http_port 0")
    add("--metrics_port", type=int, help="8002, or a free one with --http_port 0")
    add("--http_address", default="127.0.0.1", help="address that all three services listen on")
    add(
        "--executor",
        choices=("auto", *RUNTIMES),
        default="auto",
        help="what runs the engines; auto takes their own library where there is a GPU for it",
    )
    add("--run_dir", type=Path, help="new folder for repository and logs (out/serve/<time>-<pid>)")
    add("--tritonserver", type=Path, help="server binary (that of .venv/server, or on PATH)")
    add("--ready_timeout", type=float, default=900.0, help="seconds until it must answer")
    add("--probe_period", type=float, default=10.0, help="seconds between health requests")
    add(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="override a setting of triton_repo/serve/repository.json; may be repeated",
    )
    add(
        "--server_flag",
        action="append",
        default=[],
        metavar="=--FLAG=VALUE",
        help="pass a flag on to tritonserver; may be repeated",
    )
    add(
        "--run",
        nargs=argparse.REMAINDER,
        default=[],
        help="run this command with M3TRT_HTTP and M3TRT_GRPC set, then stop and return its code",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
