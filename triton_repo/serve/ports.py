"""Chooses and checks the server's ports."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass

from m3trt.serve.binary import ServeError


@dataclass(frozen=True, slots=True)
class Ports:
    http: int
    grpc: int
    metrics: int


def choose_ports(address: str, http: int, grpc: int, metrics: int) -> Ports:
    """The given ports; 0 stands for a free one.

    Raises:
        ServeError: a port is in use or given twice.
    """
    flags = {"--http_port": http, "--grpc_port": grpc, "--metrics_port": metrics}
    chosen = []
    with contextlib.ExitStack() as stack:
        for flag, port in flags.items():
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            holder = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                holder.bind((address, port))
                holder.listen(1)
            except (OSError, OverflowError) as error:
                raise ServeError(
                    f"{flag} {port} cannot be used on {address}: {error}. Stop what listens there,"
                    " or choose another port (0: any free one)"
                ) from error
            chosen.append(int(holder.getsockname()[1]))
    return Ports(*chosen)
