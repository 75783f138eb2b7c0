"""The client side of the demo: one streamed question over gRPC, one about a picture over HTTP.

Needs only numpy and tritonclient. Addresses come from M3TRT_HTTP and M3TRT_GRPC, which
`python -m m3trt.serve --run` sets, or from the flags.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import queue
import struct
import sys
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tritonclient.grpc as grpcclient

MODEL = "ensemble"
TIMEOUT_S = 120


def draw_picture(size: int = 112) -> npt.NDArray[np.uint8]:
    """A red disc over a blue gradient, uint8 [size, size, 3]."""
    rows, columns = np.mgrid[0:size, 0:size]
    picture = np.zeros((size, size, 3), np.uint8)
    picture[..., 2] = 80 + rows * 175 // size
    disc = (rows - size // 2) ** 2 + (columns - size // 2) ** 2 < (size // 3) ** 2
    picture[disc] = (220, 40, 40)
    return picture


def encode_png(picture: npt.NDArray[np.uint8]) -> bytes:
    """PNG of an RGB picture [height, width, 3]."""
    height, width, _ = picture.shape
    rows = b"".join(b"\0" + row.tobytes() for row in picture)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def stream_text(address: str, question: str, max_tokens: int) -> Iterator[str]:
    """Pieces of the answer as they arrive over gRPC.

    Raises:
        tritonclient.utils.InferenceServerException: the server answered with an error.
    """
    values: dict[str, tuple[str, npt.NDArray[Any]]] = {
        "text_input": ("BYTES", np.array([[question.encode()]], dtype=np.object_)),
        "max_tokens": ("INT32", np.array([[max_tokens]], dtype=np.int32)),
        "stream": ("BOOL", np.array([[True]])),
    }
    inputs = []
    for name, (dtype, array) in values.items():
        tensor = grpcclient.InferInput(name, list(array.shape), dtype)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    with grpcclient.InferenceServerClient(address) as client:
        client.start_stream(callback=lambda result, error: answers.put((result, error)))
        client.async_stream_infer(MODEL, inputs, enable_empty_final_response=True)
        while True:
            result, error = answers.get(timeout=TIMEOUT_S)
            if error is not None:
                raise error
            text = result.as_numpy("text_output")
            if text is not None:
                yield text.reshape(-1)[0].decode()
            if result.get_response().parameters["triton_final_response"].bool_param:
                break
        client.stop_stream()


def generate(address: str, body: dict[str, Any]) -> str:
    """The answer of HTTP `generate`.

    Raises:
        RuntimeError: the server answered with an error.
    """
    request = urllib.request.Request(
        f"http://{address}/v2/models/{MODEL}/generate",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        answer = json.load(error)
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return str(answer["text_output"])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Ask a running server two questions.")
    parser.add_argument("--http", default=os.environ.get("M3TRT_HTTP", "127.0.0.1:8000"))
    parser.add_argument("--grpc", default=os.environ.get("M3TRT_GRPC", "127.0.0.1:8001"))
    parser.add_argument("--max_tokens", type=int, default=24, help="length of each answer")
    arguments = parser.parse_args(argv)

    question = "Why is the sky blue?"
    print(f"\n== text, streamed over gRPC from {arguments.grpc} ==\nuser: {question}")
    print("assistant: ", end="", flush=True)
    pieces = 0
    for piece in stream_text(arguments.grpc, question, arguments.max_tokens):
        print(piece, end="", flush=True)
        pieces += 1
    print(f"\n({pieces} responses)")

    run_dir = Path(os.environ.get("M3TRT_RUN_DIR", "."))
    picture = run_dir / "picture.png"
    picture.write_bytes(encode_png(draw_picture()))
    question = "What is in this picture?"
    body = {
        "text_input": question,
        "max_tokens": arguments.max_tokens,
        "image_url_input": "data:image/png;base64,"
        + base64.b64encode(picture.read_bytes()).decode(),
    }
    print(f"\n== picture, HTTP generate at {arguments.http} ==\nuser: [{picture}] {question}")
    print(f"assistant: {generate(arguments.http, body)}")
    print(f"\n(From random weights the words mean nothing.) Logs and repository: {run_dir}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
