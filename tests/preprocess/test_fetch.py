"""Fetching pictures: what is refused, and what a slow or lying server can do."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from m3trt.preprocess import fetch
from m3trt.preprocess.errors import PreprocessError
from m3trt.preprocess.fetch import Fetcher

pytestmark = pytest.mark.smoke

PICTURE = bytes(range(256)) * 8


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        handler = getattr(self, f"serve_{self.path.strip('/').split('?')[0]}", None)
        if handler is None:
            self.send_error(404)
        else:
            handler()

    def answer(self, content: bytes, length: int | None) -> None:
        self.send_response(200)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(content)

    def redirect(self, target: str) -> None:
        self.send_response(302)
        self.send_header("Location", target)
        self.end_headers()

    def serve_picture(self) -> None:
        self.answer(PICTURE, len(PICTURE))

    def serve_echo(self) -> None:
        self.answer(self.path.encode(), None)

    def serve_unmeasured(self) -> None:
        self.answer(PICTURE, None)

    def serve_short(self) -> None:
        self.answer(PICTURE, len(PICTURE) + 1)

    def serve_moved(self) -> None:
        self.redirect("/picture")

    def serve_circle(self) -> None:
        self.redirect("/circle")

    def serve_to_file(self) -> None:
        self.redirect("file:///etc/hostname")

    def serve_to_loopback(self) -> None:
        self.redirect(f"http://localhost:{self.server.server_address[1]}/picture")

    def serve_drip(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.drip(b"x")

    def serve_headers(self) -> None:
        self.wfile.write(b"HTTP/1.0 200 OK\r\n")
        self.drip(b"X: y\r\n")

    def drip(self, piece: bytes) -> None:
        try:
            for _ in range(100):
                self.wfile.write(piece)
                self.wfile.flush()
                time.sleep(0.05)
        except OSError:
            pass

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()
    thread.join()


def get(fetcher: Fetcher, url: str) -> bytes:
    return fetcher.fetch(url, fetcher.deadline())


@pytest.fixture
def fetcher() -> Fetcher:
    return Fetcher(frozenset({"127.0.0.1"}), timeout_seconds=5)


class TestDataUrls:
    def test_decoded(self) -> None:
        assert get(Fetcher(), "data:image/png;base64,aGVsbG8=") == b"hello"
        assert get(Fetcher(), "DATA:;base64,aGVs bG8%3D") == b"hello"
        assert get(Fetcher(), "data:image/png; base64,aGVsbG8=") == b"hello"
        assert get(Fetcher(), "data:text/plain,a%20b") == b"a b"

    @pytest.mark.parametrize(
        ("url", "message"),
        [
            ("data:image/png;base64", "no comma"),
            ("data:image/png;base64,a", "not valid base64"),
            ("data:image/png;base64,aGVsbG8=\N{BULLET}", "not valid base64"),
        ],
    )
    def test_malformed(self, url: str, message: str) -> None:
        with pytest.raises(PreprocessError, match=message):
            get(Fetcher(), url)

    def test_too_large(self) -> None:
        for url in ("data:," + "a" * 11, "data:," + "%41" * 20):
            with pytest.raises(PreprocessError, match="more than 10 bytes"):
                get(Fetcher(max_bytes=10), url)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "picture.png",
        "/etc/passwd",
        "file:///etc/passwd",
        "ftp://example.org/a.png",
        "C:\\a.png",
        "//example.org/a.png",
        "javascript:alert(1)",
        "http:",
        "http:///a.png",
        "https://user:secret@example.org/a.png",
    ],
)
def test_refused_urls(url: str) -> None:
    with pytest.raises(PreprocessError, match=r"not allowed|must not hold") as caught:
        get(Fetcher(), url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "http://[::1",
        "http://127.0.0.1:port/",
        "http://127.0.0.1:99999/",
        "http://a\nb/",
        "http://../",
    ],
)
def test_malformed_urls(url: str) -> None:
    with pytest.raises(PreprocessError, match=r"cannot be (read|resolved)|private|not allowed"):
        get(Fetcher(), url)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "127.1", "0.0.0.0", "[::1]", "[::ffff:127.0.0.1]", "10.0.0.1"],
)
def test_private_hosts_are_refused(port: int, host: str) -> None:
    with pytest.raises(PreprocessError, match=r"private address|cannot be resolved"):
        get(Fetcher(timeout_seconds=2), f"http://{host}:{port}/picture")


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("::ffff:10.0.0.1", False),
        ("::ffff:8.8.8.8", True),
        ("64:ff9b::a00:1", False),
        ("64:ff9b::808:808", True),
        ("2002:a00:1::", False),
        ("::127.0.0.1", False),
        ("::ffff:0:127.0.0.1", False),
        ("64:ff9b:1::a00:1", False),
        ("fec0::1", False),
        ("5f00::1", False),
    ],
)
def test_which_addresses_are_public(address: str, public: bool) -> None:
    assert fetch._is_public(address) is public


def test_one_private_address_of_several_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80))
        for address in ("8.8.8.8", "10.0.0.1")
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: entries)
    with pytest.raises(PreprocessError, match=r"'example\.org' has a private address"):
        get(Fetcher(), "http://example.org/a.png")


def test_allowed_host(port: int, fetcher: Fetcher) -> None:
    assert get(fetcher, f"http://127.0.0.1:{port}/picture") == PICTURE
    assert get(fetcher, f"HTTP://127.0.0.1:{port}/unmeasured") == PICTURE
    by_port = Fetcher(frozenset({f"localhost:{port}"}))
    assert get(by_port, f"http://LOCALHOST:{port}/picture") == PICTURE
    with pytest.raises(PreprocessError, match="private address"):
        get(Fetcher(frozenset({"localhost:1"})), f"http://localhost:{port}/picture")


def test_path_and_query_are_quoted(port: int, fetcher: Fetcher) -> None:
    url = f"http://127.0.0.1:{port}/echo?a=1&b=é c%20d#fragment"
    assert get(fetcher, url) == b"/echo?a=1&b=%C3%A9%20c%20d"


def test_redirects(port: int, fetcher: Fetcher) -> None:
    assert get(fetcher, f"http://127.0.0.1:{port}/moved") == PICTURE
    for path, message in (
        ("circle", "redirects more than 3 times"),
        ("to_file", "not allowed"),
        ("to_loopback", "'localhost' has a private address"),
    ):
        with pytest.raises(PreprocessError, match=message):
            get(fetcher, f"http://127.0.0.1:{port}/{path}")


def test_failures(port: int, fetcher: Fetcher) -> None:
    with pytest.raises(PreprocessError, match="answered 404"):
        get(fetcher, f"http://127.0.0.1:{port}/missing")
    with pytest.raises(PreprocessError, match="ended after 2048 of 2049 bytes"):
        get(fetcher, f"http://127.0.0.1:{port}/short")
    with pytest.raises(PreprocessError, match="cannot be read"):
        get(fetcher, f"https://127.0.0.1:{port}/picture")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(PreprocessError, match="refused"):
            get(fetcher, f"http://127.0.0.1:{unused.getsockname()[1]}/picture")


@pytest.mark.parametrize("path", ["picture", "unmeasured"])
def test_too_large(port: int, path: str) -> None:
    fetcher = Fetcher(frozenset({"127.0.0.1"}), max_bytes=2047)
    with pytest.raises(PreprocessError, match="more than 2047 bytes"):
        get(fetcher, f"http://127.0.0.1:{port}/{path}")


@pytest.mark.parametrize("path", ["drip", "headers"])
def test_slow_server_meets_the_deadline(port: int, path: str) -> None:
    fetcher = Fetcher(frozenset({"127.0.0.1"}), timeout_seconds=0.4)
    start = time.monotonic()
    with pytest.raises(PreprocessError, match=r"no answer in 0\.4 s"):
        get(fetcher, f"http://127.0.0.1:{port}/{path}")
    assert time.monotonic() - start < 2


def test_silent_server_meets_the_deadline() -> None:
    fetcher = Fetcher(frozenset({"127.0.0.1"}), timeout_seconds=0.3)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        for scheme in ("http", "https"):
            with pytest.raises(PreprocessError, match=r"no answer in 0\.3 s"):
                get(fetcher, f"{scheme}://127.0.0.1:{listener.getsockname()[1]}/")
