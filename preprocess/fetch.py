"""Fetches the pictures that a request names: data URLs and http(s), nothing else.

A request must not be able to read the server's files or to reach the network behind it. So a host
is resolved once, its address is checked, and the connection goes to that very address.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
import urllib.parse
from dataclasses import dataclass

from m3trt.preprocess.errors import PreprocessError

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_IPV6_GLOBAL = ipaddress.ip_network("2000::/3")
_CHUNK = 1 << 16
_REDIRECTS = (301, 302, 303, 307, 308)


@dataclass(frozen=True, slots=True)
class Fetcher:
    """Limits of fetching; `fetch` is safe to call from several threads."""

    allowed_media_hosts: frozenset[str] = frozenset()
    """`host` or `host:port` entries that may have private or loopback addresses."""

    timeout_seconds: float = 30.0
    """For all pictures of one request together."""

    max_bytes: int = 32 * 1024 * 1024
    max_redirects: int = 3

    def deadline(self) -> float:
        """When the pictures of a request that begins now must be there, for `fetch`."""
        return time.monotonic() + self.timeout_seconds

    def fetch(self, url: str, deadline: float) -> bytes:
        """The bytes behind a `data:`, `http:` or `https:` URL.

        Raises:
            PreprocessError: the scheme or the host is not allowed, the transfer fails, is too
                large or does not end before `deadline`.
        """
        scheme = url.split(":", 1)[0].lower() if ":" in url else ""
        if scheme == "data":
            return self._decode_data_url(url)
        if scheme not in ("http", "https"):
            raise PreprocessError(
                f"image URL {_shown(url)} is not allowed: expected data:, http: or https:"
            )
        try:
            for _ in range(self.max_redirects + 1):
                content, target = self._get(url, deadline)
                if target is None:
                    return content
                url = urllib.parse.urljoin(url, target)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if isinstance(error, PreprocessError):
                raise
            late = time.monotonic() >= deadline
            reason = f"no answer in {self.timeout_seconds:g} s" if late else str(error)
            raise PreprocessError(f"image URL {_shown(url)} cannot be read: {reason}") from error
        raise PreprocessError(
            f"image URL {_shown(url)} redirects more than {self.max_redirects} times"
        )

    def _decode_data_url(self, url: str) -> bytes:
        header, comma, payload = url.partition(",")
        if not comma:
            raise PreprocessError(f"image URL {_shown(url)} has no comma before its data")
        if len(payload) > 4 * self.max_bytes:
            raise PreprocessError(self._too_large("the data URL"))
        data = urllib.parse.unquote_to_bytes(payload)
        if header.lower().replace(" ", "").endswith(";base64"):
            try:
                data = base64.b64decode(b"".join(data.split()), validate=True)
            except binascii.Error as error:
                raise PreprocessError(
                    f"image URL {_shown(url)} is not valid base64: {error}"
                ) from error
        if len(data) > self.max_bytes:
            raise PreprocessError(self._too_large("the data URL"))
        return data

    def _get(self, url: str, deadline: float) -> tuple[bytes, str | None]:
        """One request: (content, None), or (b"", redirect target)."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise PreprocessError(
                f"image URL {_shown(url)} is not allowed: expected http(s)://host"
            )
        if parts.username is not None or parts.password is not None:
            raise PreprocessError("an image URL must not hold a user name or password")
        secure = parts.scheme == "https"
        port = parts.port or (443 if secure else 80)
        address = self._resolve(parts.hostname, port)
        with _PinnedConnection(parts.hostname, port, address, secure, deadline) as connection:
            path = urllib.parse.quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
            query = urllib.parse.quote(parts.query, safe="/%:@!$&'()*+,;=~-._?")
            connection.request(
                "GET",
                f"{path}?{query}" if query else path,
                headers={"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "m3trt"},
            )
            response = connection.getresponse()
            target = response.getheader("Location")
            if response.status in _REDIRECTS and target:
                return b"", target
            if response.status != 200:
                raise PreprocessError(
                    f"image URL {_shown(url)} answered {response.status} {response.reason}"
                )
            content = self._read(response)
            _left(deadline)  # a transfer that was cut off at the deadline can look complete
            return content, None

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        announced = response.getheader("Content-Length", "")
        size = int(announced) if announced.isdecimal() else None
        if size is not None and size > self.max_bytes:
            raise PreprocessError(self._too_large("the file behind the image URL"))
        content = bytearray()
        while chunk := response.read1(_CHUNK):
            content += chunk
            if len(content) > self.max_bytes:
                raise PreprocessError(self._too_large("the file behind the image URL"))
        if size is not None and len(content) < size:
            raise OSError(f"the transfer ended after {len(content)} of {size} bytes")
        return bytes(content)

    def _resolve(self, host: str, port: int) -> str:
        """One address of `host`, all of which must be public unless the host is allowed."""
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise PreprocessError(f"image host {host!r} cannot be resolved: {error}") from error
        addresses = [str(entry[4][0]) for entry in found]
        allowed = {host.lower(), f"{host.lower()}:{port}"} & self.allowed_media_hosts
        if not allowed and not all(_is_public(address) for address in addresses):
            raise PreprocessError(
                f"image host {host!r} has a private address, which is not allowed: add it to"
                " allowed_media_hosts to permit it"
            )
        return addresses[0]

    def _too_large(self, what: str) -> str:
        return f"{what} holds more than {self.max_bytes} bytes: send a smaller picture"


class _PinnedConnection(http.client.HTTPConnection):
    """Connects to a resolved address, so that a second look-up cannot give another one, and shuts
    the socket at the deadline, so that a peer sending byte by byte cannot hold the caller."""

    def __init__(self, host: str, port: int, address: str, secure: bool, deadline: float) -> None:
        super().__init__(host, port, timeout=_left(deadline))
        self._address = address
        self._secure = secure
        self._watchdog = threading.Timer(_left(deadline), self._abort)
        self._watchdog.daemon = True
        self._open: socket.socket | None = None

    def __enter__(self) -> _PinnedConnection:
        self._watchdog.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._watchdog.cancel()
        self.close()
        if self._open is not None:
            self._open.close()

    def connect(self) -> None:
        self.sock = self._open = socket.create_connection((self._address, self.port), self.timeout)
        if self._secure:
            context = ssl.create_default_context()
            secured = context.wrap_socket(
                self._open, server_hostname=self.host, do_handshake_on_connect=False
            )
            self.sock = self._open = secured
            secured.do_handshake()

    def _abort(self) -> None:
        if self._open is not None:
            with contextlib.suppress(OSError):
                self._open.shutdown(socket.SHUT_RDWR)


def _is_public(text: str) -> bool:
    address = ipaddress.ip_address(text.split("%", 1)[0])
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            address = inner
        elif address not in _IPV6_GLOBAL:
            return False
    return address.is_global and not address.is_multicast


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def _shown(url: str) -> str:
    return repr(url if len(url) <= 80 else url[:77] + "...")
