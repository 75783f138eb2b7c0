"""A real server with a tiny random model, once per session, and clients for it."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from m3trt.build.__main__ import main as build
from m3trt.convert.__main__ import main as convert
from m3trt.convert.tiny import write_tiny_checkpoint

ROOT = Path(__file__).resolve().parents[2]
MODELS_PYTHON = ROOT / ".venv" / "models" / "bin" / "python"
ENTRIES = ("ensemble", "tensorrt_llm_bls")
MAX_SEQ_LEN = 1024


@pytest.fixture(autouse=True, scope="session")
def interrupts_reach_servers() -> None:
    """Behind `nohup make test &` they would be ignored, and inherited so."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture(scope="session")
def checkpoint_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "hf"
    write_tiny_checkpoint(path, "demo")
    return path


@pytest.fixture(scope="session")
def make_engine(
    checkpoint_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """make_engine(dtype) -> an engine directory for the reference executor."""
    made: dict[str, Path] = {}

    def make(dtype: str) -> Path:
        if dtype not in made:
            folder = tmp_path_factory.mktemp("engine")
            middle, made[dtype] = folder / "checkpoint", folder / "engine"
            command = ["--model_dir", str(checkpoint_dir), "--output_dir", str(middle)]
            assert convert([*command, "--dtype", dtype]) == 0
            command = ["--checkpoint_dir", str(middle), "--output_dir", str(made[dtype])]
            command += ["--runtime", "reference", "--max_seq_len", str(MAX_SEQ_LEN)]
            assert build(command) == 0
        return made[dtype]

    return make


@pytest.fixture(scope="session")
def engine_dir(make_engine: Callable[[str], Path]) -> Path:
    return make_engine("bfloat16")


@dataclass
class Reply:
    """One HTTP answer."""

    status: int
    body: dict[str, Any]

    @property
    def text(self) -> str:
        assert "text_output" in self.body, self.body
        return str(self.body["text_output"])

    @property
    def error(self) -> str:
        return str(self.body.get("error", ""))


@dataclass
class Answer:
    """What one gRPC stream brought."""

    pieces: list[str] = field(default_factory=list)
    arrays: list[dict[str, npt.NDArray[Any]]] = field(default_factory=list)
    error: str = ""

    @property
    def text(self) -> str:
        assert not self.error
        return "".join(self.pieces)

    @property
    def finish_reason(self) -> str:
        return str(self.arrays[-1]["finish_reason"].reshape(-1)[0].decode())


class Server:
    """A supervised server that runs as a process, and simple clients for it."""

    def __init__(self, process: subprocess.Popen[str], run_dir: Path) -> None:
        self.process = process
        self.run_dir = run_dir
        self.info: dict[str, str] = json.loads((run_dir / "server.json").read_text())

    @property
    def log(self) -> str:
        return (self.run_dir.parent / "supervisor.log").read_text()

    # ---- HTTP ---------------------------------------------------------------------------------

    def generate(self, model: str = "ensemble", timeout: float = 60, **body: Any) -> Reply:
        with self.open(f"{model}/generate", timeout, **body) as response:
            return Reply(response.status, json.load(response))

    def generate_stream(self, model: str = "ensemble", **body: Any) -> list[dict[str, Any]]:
        """All events of a `generate_stream` call."""
        with self.open(f"{model}/generate_stream", 60, stream=True, **body) as response:
            lines = [line.decode().strip() for line in response]
        return [json.loads(line.removeprefix("data: ")) for line in lines if line]

    def open(self, path: str, timeout: float, **body: Any) -> Any:
        body = {"text_input": "hello", "max_tokens": 8} | body
        data = json.dumps({key: value for key, value in body.items() if value is not None})
        request = urllib.request.Request(
            f"http://{self.info['http']}/v2/models/{path}", data.encode()
        )
        try:
            return urllib.request.urlopen(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            return error

    def metric(self, label: str) -> float:
        """The engine metric whose label has this value, for example "used"."""
        with urllib.request.urlopen(f"http://{self.info['metrics']}/metrics") as response:
            lines = response.read().decode().splitlines()
        found = [line for line in lines if line.startswith("nv_trt_llm") and f'"{label}"' in line]
        assert len(found) == 1, found
        return float(found[0].rpartition(" ")[2])

    # ---- gRPC ---------------------------------------------------------------------------------

    def stream(self, model: str, cancel_after: int | None = None, **values: Any) -> Answer:
        """Stream one request; with `cancel_after`, cancel it after so many responses."""
        import tritonclient.grpc as grpcclient

        answer, arrived = Answer(), queue.SimpleQueue[tuple[Any, Any]]()
        with grpcclient.InferenceServerClient(self.info["grpc"]) as client:
            client.start_stream(callback=lambda result, error: arrived.put((result, error)))
            inputs = grpc_inputs(**values)
            client.async_stream_infer(model, inputs, enable_empty_final_response=True)
            while True:
                result, error = arrived.get(timeout=60)
                if error is not None:
                    answer.error = str(error)
                    break
                response = result.get_response()
                names = [output.name for output in response.outputs]
                if names:
                    answer.arrays.append({name: result.as_numpy(name) for name in names})
                    if "text_output" in names:
                        answer.pieces.append(result.as_numpy("text_output").item().decode())
                if len(answer.pieces) == cancel_after:
                    client.stop_stream(cancel_requests=True)
                    return answer
                if response.parameters["triton_final_response"].bool_param:
                    break
            client.stop_stream()
        return answer

    def stop_request(self, request_id: str) -> None:
        """Ask the engine to cancel what runs under this request id."""
        import tritonclient.grpc as grpcclient

        ended = queue.SimpleQueue[tuple[Any, Any]]()
        with grpcclient.InferenceServerClient(self.info["grpc"]) as client:
            client.start_stream(callback=lambda result, error: ended.put((result, error)))
            inputs = grpc_inputs(
                text_input=None,
                max_tokens=None,
                input_ids=0,
                input_lengths=1,
                request_output_len=1,
                stream=None,
                stop=True,
            )
            client.async_stream_infer(
                "tensorrt_llm", inputs, request_id=request_id, enable_empty_final_response=True
            )
            _, error = ended.get(timeout=10)
            assert error is None
            client.stop_stream()

    # ---- processes ----------------------------------------------------------------------------

    def server_pid(self) -> int:
        """The running tritonserver, a child of the supervisor."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return next(
            int(pid)
            for pid in children.read_text().split()
            if "tritonserver" in Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[0]
        )

    def model_pid(self, model: str) -> int:
        wanted = str(self.run_dir / "repository" / model / "1" / "model.py")
        return next(pid for pid, line in processes() if wanted in line)

    def leftovers(self) -> list[str]:
        """Processes and shared-memory files of this server that exist."""
        found = [f"{pid} {line}" for pid, line in processes() if str(self.run_dir) in line]
        shared = Path("/dev/shm").glob(f"m3trt_{self.process.pid}_*")
        return [*found, *(path.name for path in shared)]

    def stop(self, number: int = signal.SIGINT) -> int:
        """Send a signal to the supervisor; returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(30)


def processes() -> list[tuple[int, str]]:
    """(pid, command line) of every process but this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().decode(errors="replace").replace("\0", " ")
        except OSError:
            continue
        if int(path.parent.name) != os.getpid():
            found.append((int(path.parent.name), line))
    return found


def grpc_inputs(**values: Any) -> list[Any]:
    """InferInputs of batch size one; a NumPy array is sent as it is, batch dimension included."""
    import tritonclient.grpc as grpcclient
    from tritonclient.utils import np_to_triton_dtype

    inputs = []
    for name, value in {"text_input": "hello", "max_tokens": 8, "stream": True, **values}.items():
        if value is None:
            continue
        array = value if isinstance(value, np.ndarray) else _array(name, value)
        tensor = grpcclient.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


def _array(name: str, value: Any) -> npt.NDArray[Any]:
    items = value if isinstance(value, list) else [value]
    if isinstance(items[0], str | bytes):
        encoded = [item.encode() if isinstance(item, str) else item for item in items]
        return np.array([encoded], dtype=np.object_)
    if isinstance(items[0], bool):
        return np.array([items])
    if isinstance(items[0], float):
        return np.array([items], dtype=np.float32)
    return np.array([items], dtype=np.uint64 if name == "seed" else np.int32)


@pytest.fixture(scope="session")
def start_server() -> Iterator[Callable[..., Server]]:
    """start_server(engine_dir, folder, *flags) -> a server that answers; stopped at the end."""
    started: list[Server] = []

    def start(engine_dir: Path, folder: Path, *flags: str) -> Server:
        if not MODELS_PYTHON.exists():
            pytest.fail(f"{MODELS_PYTHON} is missing: run `make setup`")
        run_dir = folder / "run"
        command = [str(MODELS_PYTHON), "-m", "m3trt.serve", "--engine_dir", str(engine_dir)]
        command += ["--http_port", "0", "--run_dir", str(run_dir), "--ready_timeout", "120"]
        with (folder / "supervisor.log").open("w") as log:
            process = subprocess.Popen([*command, *flags], stdout=log, stderr=log, text=True)
        deadline = time.monotonic() + 120
        while not (run_dir / "server.json").exists():
            if process.poll() is not None or time.monotonic() > deadline:
                process.terminate()
                pytest.fail((folder / "supervisor.log").read_text())
            time.sleep(0.1)
        started.append(Server(process, run_dir))
        return started[-1]

    yield start
    for server in started:
        server.stop()
        assert server.leftovers() == []


@pytest.fixture(scope="session")
def server(
    start_server: Callable[..., Server],
    engine_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Server:
    """The server that tests share: none may stop it."""
    return start_server(engine_dir, tmp_path_factory.mktemp("server"))


@pytest.fixture(params=ENTRIES)
def entry(request: pytest.FixtureRequest) -> str:
    """Both models that clients call."""
    return str(request.param)
