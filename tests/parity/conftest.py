"""transformers' own model as the oracle, and the whole line from its checkpoint to our logits.

One random checkpoint per geometry is written under released names. transformers loads it in
float64 (the oracle), float32 and bfloat16; convert and build make engines of it; both sides see
the same token ids.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from m3trt.build.__main__ import main as build
from m3trt.build.engine_dir import EngineDir
from m3trt.build.library import resolve_runtime
from m3trt.convert.__main__ import main as convert
from m3trt.convert.tiny import write_tiny_checkpoint
from m3trt.runtime.executors import create_executor, create_vision_executor
from m3trt.runtime.step import StepExecutor, StepInputs
from safetensors import safe_open

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parent))  # its helper modules

NUMPY_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
ROUTER = ("block_sparse_moe.gate.weight", "e_score_correction_bias")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """checkpoint(geometry) -> a bfloat16 checkpoint; every dtype starts from the same weights."""
    made: dict[str, Path] = {}

    def make(geometry: str) -> Path:
        if geometry not in made:
            made[geometry] = tmp_path_factory.mktemp(geometry) / "hf"
            write_tiny_checkpoint(made[geometry], geometry, seed=1)
        return made[geometry]

    return make


@pytest.fixture(scope="session")
def engine(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., EngineDir]:
    """engine(geometry, dtype, tp_size, runtime) -> an engine made by the two commands."""
    made: dict[tuple[str, str, int, str], EngineDir] = {}

    def make(geometry: str, dtype: str, tp_size: int = 1, runtime: str = "reference") -> EngineDir:
        key = geometry, dtype, tp_size, runtime
        if key not in made:
            folder = tmp_path_factory.mktemp("engine")
            source, middle, target = str(checkpoint(geometry)), folder / "ckpt", folder / "engine"
            command = ["--model_dir", source, "--output_dir", str(middle), "--dtype", dtype]
            assert convert([*command, "--tp_size", str(tp_size)]) == 0
            command = ["--checkpoint_dir", str(middle), "--output_dir", str(target)]
            command += ["--runtime", runtime, "--gather_context_logits", "--workers", "3"]
            assert build(command) == 0
            made[key] = EngineDir.load(target)
        return made[key]

    return make


# ---- the oracle ------------------------------------------------------------------------------


@contextlib.contextmanager
def all_double() -> Iterator[None]:
    """Make the float32 sections of the modelling code compute in float64."""
    from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as code

    patch = pytest.MonkeyPatch()
    softmax = torch.nn.functional.softmax
    functional = types.SimpleNamespace(**vars(torch.nn.functional))
    functional.softmax = lambda x, dim, dtype=None: softmax(x, dim=dim)
    shadow = types.SimpleNamespace(**vars(torch.nn))
    shadow.functional = functional
    with patch.context() as context:
        context.setattr(torch.Tensor, "float", torch.Tensor.double)
        context.setattr(torch, "float", torch.float64)
        context.setattr(code, "nn", shadow)
        yield


@pytest.fixture(scope="session")
def in_double() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """in_double() -> a context in which transformers' float32 sections compute in float64."""
    return all_double


@dataclass(frozen=True)
class Forward:
    """Logits [tokens, vocab], image features [rows, hidden] and, a sparse layer each, block scores
    [index heads, tokens, blocks] and block ids [index heads, tokens, top_k]."""

    logits: Any
    features: Any
    block_scores: list[Any]
    block_ids: list[Any]


@dataclass
class Oracle:
    """transformers' model in one dtype; remembers the forwards that it has run, of which there is
    one for any `ids`."""

    model: Any
    double: bool
    forwards: dict[bytes, Forward] = field(default_factory=dict)

    def forward(self, ids: Any, **images: Any) -> Forward:
        """One forward over the whole sequence `ids`, with or without images."""
        key = np.asarray(ids).tobytes()
        if key not in self.forwards:
            self.forwards[key] = self._forward(ids, images)
        return self.forwards[key]

    def _forward(self, ids: Any, images: dict[str, Any]) -> Forward:
        scores, chosen = [], []
        topk = torch.Tensor.topk

        def recording(x: Any, *args: Any, **kwargs: Any) -> Any:
            values, indices = topk(x, *args, **kwargs)
            if x.dim() == 4:  # [batch, index heads, tokens, blocks]: the indexer's
                scores.append(x[0].double().numpy())
                chosen.append(indices.masked_fill(values.isneginf(), -1)[0].numpy())
            return values, indices

        with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "topk", recording)
            with all_double() if self.double else contextlib.nullcontext():
                out = self.model(input_ids=torch.tensor([list(ids)]), use_cache=False, **images)
        features = None
        if images:
            features = torch.cat(list(out.image_hidden_states)).double().numpy()
        return Forward(out.logits[0].double().numpy(), features, scores, chosen)

    def generate(self, ids: Any, count: int) -> list[int]:
        """Greedy continuation, never stopping early."""
        prompt = torch.tensor([list(ids)])
        out = self.model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return out[0, len(ids) :].tolist()


@pytest.fixture(scope="session")
def oracle(
    checkpoint: Callable[[str], Path], importable_torchvision: None
) -> Callable[[str, str], Oracle]:
    """oracle(geometry, "float64" | "float32" | "bfloat16")."""
    from transformers import AutoModelForImageTextToText

    made: dict[tuple[str, str], Oracle] = {}

    def make(geometry: str, dtype: str) -> Oracle:
        if (geometry, dtype) not in made:
            path = checkpoint(geometry)
            with all_double() if dtype == "float64" else contextlib.nullcontext():
                model = AutoModelForImageTextToText.from_pretrained(
                    path,
                    dtype=getattr(torch, dtype),
                    attn_implementation="eager",
                    experts_implementation="eager",
                ).eval()
                recompute_frequencies(model)
            restore_router(model, path, torch.float64 if dtype == "float64" else torch.float32)
            made[geometry, dtype] = Oracle(model, dtype == "float64")
        return made[geometry, dtype]

    return make


def recompute_frequencies(model: Any) -> None:
    """Rotary frequencies in the present default dtype: exact ones under `all_double`."""
    for module in model.modules():
        for name in ("compute_default_rope_parameters", "compute_axial_rope_parameters"):
            if hasattr(module, name):
                module.inv_freq = getattr(module, name)(module.config)[0]


def restore_router(model: Any, path: Path, dtype: Any) -> None:
    """Gate and routing bias as the checkpoint stores them; from_pretrained rounds them to bf16."""
    stored = {}
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                if name.endswith(ROUTER):
                    stored[name] = tensors.get_tensor(name)
    for number, layer in enumerate(model.model.language_model.layers):
        mine = {k: v for k, v in stored.items() if f"layers.{number}." in k}
        if mine:
            for name, value in mine.items():
                owner = layer.mlp.gate
                where = "weight" if name.endswith("weight") else "e_score_correction_bias"
                owner = owner if hasattr(owner, where) else layer.mlp
                getattr(owner, where).data = value.to(dtype)


# ---- our side --------------------------------------------------------------------------------


@dataclass
class Driver:
    """Feeds sequences to an executor step by step, as a scheduler would: pages are handed out in
    random order, unused ones hold NaN."""

    executor: StepExecutor
    engine: EngineDir
    table: Any
    free: list[int]

    def step(
        self,
        parts: list[tuple[Any, int, Any]],
        decode: int = 0,
        padding: int = 0,
        padded_rows: int = 0,
    ) -> list[Any]:
        """Run parts (ids, first position, pages), the last `decode` of them as decode rows, and
        return the logits of all their tokens."""
        new = [len(ids) for ids, _, _ in parts] + [0] * padded_rows
        lengths = [first + len(ids) for ids, first, _ in parts] + [0] * padded_rows
        table = np.full((len(new), max(len(pages) for _, _, pages in parts) + 1), -1, np.int32)
        for row, (_, _, pages) in enumerate(parts):
            table[row, : len(pages)] = pages
        cu = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
        ids = np.concatenate([ids for ids, _, _ in parts] + [np.zeros(padding)])
        positions = [np.arange(first, first + len(ids)) for ids, first, _ in parts]
        inputs = StepInputs(
            input_ids=ids.astype(np.int32),
            position_ids=np.concatenate([*positions, np.zeros(padding)]).astype(np.int32),
            cu_query_lens=cu,
            sequence_length=np.array(lengths, np.int32),
            kv_cache_block_offsets=table,
            decode_shape=(decode + padded_rows, 1),
            logit_rows=np.arange(cu[-1], dtype=np.int32),
            prompt_embedding_table=self.table,
        )
        return np.split(self.executor.step(inputs), cu[1 : len(parts)])

    def run(self, ids: Any, chunk: int | None = None, decode: int = 0) -> Any:
        """Logits of a whole sequence: prefill in chunks, then `decode` single decode steps."""
        sequence = Sequence(self, ids)
        context, rows = len(ids) - decode, []
        while sequence.done < context:
            rows.append(sequence.context(min(chunk or context, context - sequence.done)))
        rows += [sequence.decode() for _ in range(decode)]
        return np.concatenate(rows)

    def close(self) -> None:
        self.executor.close()


class Sequence:
    """A sequence of known tokens, its pages and how many of its tokens have been run."""

    def __init__(self, driver: Driver, ids: Any) -> None:
        self.driver, self.ids, self.done = driver, ids, 0
        count = -(-len(ids) // driver.engine.config.tokens_per_block)
        self.pages = np.array([driver.free.pop() for _ in range(count)], np.int32)

    def take(self, count: int) -> tuple[Any, int, Any]:
        """The next `count` tokens as a part of a step."""
        begin, self.done = self.done, self.done + count
        return self.ids[begin : self.done], begin, self.pages

    def context(self, count: int) -> Any:
        return self.driver.step([self.take(count)])[0]

    def decode(self) -> Any:
        return self.driver.step([self.take(1)], decode=1)[0]


@pytest.fixture(scope="session")
def driver(engine: Callable[..., EngineDir]) -> Callable[..., Driver]:
    """driver(geometry, dtype, tp_size, table, runtime, pages) -> a fresh executor with poisoned
    pages."""

    def make(
        geometry: str,
        dtype: str,
        tp_size: int = 1,
        table: Any = None,
        runtime: str = "reference",
        pages: int = 0,
    ) -> Driver:
        found = engine(geometry, dtype, tp_size, runtime)
        pages = pages or 3 * found.build.max_pages_per_sequence(found.config)
        executor = create_executor(found, runtime, pages)
        poison(executor)
        if table is None:
            table = np.zeros((1, found.config.hidden_size), NUMPY_DTYPES[dtype])
        order = np.random.default_rng(5).permutation(pages).tolist()
        return Driver(executor, found, table, order)

    return make


def poison(executor: Any) -> None:
    """Fill the caches with NaN."""
    for program in getattr(executor, "_programs", []):
        for name, array in program._bound.items():
            if "cache" in name:
                array[...] = np.nan
    executor = getattr(executor, "_rank0", executor)  # of a tensor-parallel group on GPUs
    if engine := getattr(executor, "_engine", None):
        for name, binding in engine._bound.items():
            if "cache" in name:
                binding.memory.fill_(0xFF)
        torch.cuda.synchronize()


@pytest.fixture(scope="session")
def sequence() -> type[Sequence]:
    """sequence(driver, ids)."""
    return Sequence


@pytest.fixture(scope="session")
def vision(engine: Callable[..., EngineDir]) -> Callable[[str, str], Any]:
    """vision(geometry, dtype, runtime) -> encode(patches float32, positions, cu_seqlens)."""

    def make(geometry: str, dtype: str, runtime: str = "reference") -> Callable[..., Any]:
        executor = create_vision_executor(engine(geometry, dtype, 1, runtime), runtime)
        kind = NUMPY_DTYPES[dtype]
        return lambda patches, *segments: executor.encode(patches.astype(kind), *segments)

    return make


@pytest.fixture(scope="session")
def gpu_runtime() -> str:
    """The library that builds and runs engines on this machine's GPU."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU on this machine")
    name = resolve_runtime("auto")
    assert name != "reference", "neither tensorrt nor tensorrt_rtx can be imported"
    return name


@pytest.fixture(scope="session")
def reference_logits(
    engine: Callable[..., EngineDir], driver: Callable[..., Driver]
) -> Callable[..., Any]:
    """reference_logits(geometry, dtype, ids, table): the reference executor's. With many heads it
    takes a minute, so they are kept in out/reference."""
    folder = Path(__file__).resolve().parents[2] / "out" / "reference"

    def make(geometry: str, dtype: str, ids: Any, table: Any = None) -> Any:
        found = engine(geometry, dtype)
        key = hashlib.sha256(found.weights(0).read_bytes())
        for array in (ids, table):
            key.update(b"" if array is None else np.ascontiguousarray(array).tobytes())
        file = folder / f"{key.hexdigest()[:16]}.npy"
        if not file.exists():
            folder.mkdir(parents=True, exist_ok=True)
            np.save(file, driver(geometry, dtype, table=table).run(ids, 2048))
        return np.load(file)

    return make


@pytest.fixture
def within(request: pytest.FixtureRequest) -> Callable[..., None]:
    """within(what, ours, theirs, exact): our largest error, and the median over rows of the largest
    in a row, are at most twice those of transformers in the same dtype.

    In bfloat16 rounding flips an expert or a block for a few tokens, more or fewer by chance; such
    a token is off by as much as the logits are large, and only the median sees past them.
    `pytest -rA` shows the figures.
    """

    def check(what: str, ours: Any, theirs: Any, exact: Any) -> None:
        assert ours.shape == exact.shape
        rows = [np.abs(np.asarray(x, np.float64) - exact).max(axis=-1) for x in (ours, theirs)]
        (our_max, our_median), (their_max, their_median) = ((r.max(), np.median(r)) for r in rows)
        print(
            f"{request.node.name} {what}: largest error {our_max:.2e} (transformers"
            f" {their_max:.2e}), median of the rows' {our_median:.2e} ({their_median:.2e})"
        )
        assert our_max <= 2 * their_max
        assert our_median <= 2 * their_median

    return check


@pytest.fixture(scope="session")
def token_ids() -> Callable[[int], Any]:
    """token_ids(n) -> n random ids below the special tokens of the tiny vocabularies."""
    return lambda n: np.random.default_rng(n).integers(0, 490, n).astype(np.int32)
