"""What the benches of MSA's decode and prefill share: contestants, checks, timing, table."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, Protocol

import torch
from m3trt.bench import kernel_library as kernels
from m3trt.bench import msa_steps as steps
from m3trt.bench.msa_steps import Step
from m3trt.bench.needs import require_gpus
from torch import Tensor

FLOAT8 = "float8_e4m3"


class Contestant(Protocol):
    """Someone's kernels for MSA."""

    name: str

    def retune(self) -> None:
        """Forget what an autotuner chose for another case."""

    def select(self, s: Step) -> Callable[[], Tensor]:
        """Block ids [G, N, 16]."""

    def attend(self, s: Step) -> Callable[[Tensor], Tensor]:
        """Attention [N, Hq, D] over given blocks."""


@dataclass
class Contestants:
    """Who runs beside whom. `ours` and `fa3` also have `dense`."""

    ours: Any = None
    peers: list[Contestant] = field(default_factory=list)
    fa3: Any = None

    @classmethod
    def load(cls, folder: Path | None) -> Contestants:
        """Our kernels, and the peers' where their files' folder is given."""
        from m3trt.bench.msa_library import Ours
        from m3trt.bench.peers import FlashAttention3, load_peers

        ours = Ours()
        if folder is None:
            return cls(ours)
        return cls(ours, list(load_peers(folder)), FlashAttention3(folder))

    def of(self, dtype: str) -> list[Contestant]:
        """Those with kernels for this type of caches."""
        return [*([self.ours] if self.ours else []), *(self.peers if dtype != FLOAT8 else [])]


def command(
    part: str,
    quick: Sequence[Any],
    full: Callable[[], list[Any]],
    run: Callable[[Sequence[Any], Contestants, float], int],
    argv: Sequence[str] | None,
) -> int:
    """`python -m m3trt.bench.{part}`: run, record and print every case; 1 if one failed."""
    parser = argparse.ArgumentParser(
        prog=f"python -m m3trt.bench.{part}", description=f"Time MSA's {part} kernels."
    )
    parser.add_argument("--peers", type=Path, help="folder of the peers' files (m3trt.bench.peers)")
    parser.add_argument("--quick", action="store_true", help="only the main cases")
    parser.add_argument("--limit", type=float, default=inf, help="no new case after these seconds")
    args = parser.parse_args(argv)
    require_gpus(parser)
    return run(quick if args.quick else full(), Contestants.load(args.peers), args.limit)


def make_call(who: Contestant, part: str, s: Step, ids: Tensor) -> Callable[[], Any]:
    """One part on one step; in the chain of both, the own selection feeds the attention."""
    if part == "select":
        return who.select(s)
    attend = who.attend(s)
    if part == "attend":
        return lambda: attend(ids)
    select = who.select(s)
    return lambda: attend(select())


def verify(who: Contestant, part: str, s: Step, ids: Tensor, tokens: Sequence[int]) -> None:
    """Selection and attention of these tokens against fp32.

    Raises:
        AssertionError: something is wrong with them.
    """
    if part != "attend":
        ids = who.select(s)().clone()
    out = who.attend(s)(ids) if part != "select" else None
    for token in tokens:
        if part != "attend":
            steps.check_selection(ids, s, token)
        if out is not None:
            steps.check_attention(out, s, token, ids)


def still_usable() -> None:
    """After a failure: raises what every later call would, if the GPU's context is lost."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def elapsed(call: Callable[[], Any]) -> float:
    """Seconds of one call."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3


@dataclass
class Table:
    """One line a measurement, printed as it is taken."""

    targets: Mapping[Any, float]
    started: float = field(default_factory=time.monotonic)

    def seconds(self) -> float:
        """Since the table began."""
        return time.monotonic() - self.started

    def line(self, key: Any, record: Mapping[str, Any]) -> None:
        case = record["case"]
        heads = f"{case['q_heads']}/{case['kv_heads']}/{case['index_heads']}"
        rest = {k: v for k, v in case.items() if not k.endswith("_heads") and v is not False}
        named = " ".join(f"{k} {v}" for k, v in rest.items() if (k, v) != ("dtype", "bfloat16"))
        seconds = record.get("seconds")
        text = (
            f"[{time.monotonic() - self.started:5.1f} s] {record['bench']:20} {heads:7} {named}: "
        )
        if "error" in record:
            text += record["error"]
        else:
            text += f"{_unit(seconds)}, floor {_unit(record['floor_seconds'])}"
            if key in self.targets:
                text += f", target {_unit(self.targets[key])}"
            for name, other in record["baselines"].items():
                ratio = f" ({other / seconds:.2f}x)" if seconds else ""
                text += f", {name} {_unit(other)}{ratio}"
        print(text, flush=True)


def _unit(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


@dataclass(frozen=True)
class Work:
    """What a part of a step cannot do without: bytes read and written, operations."""

    bytes: float
    flops: float = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flops + other.flops)

    def floor(self) -> tuple[float, str]:
        """Seconds at the rates that an H200 sustains, and which of them takes longer."""
        times = {
            "bytes": self.bytes / (kernels.READ_TBS * 1e12),
            "flops": self.flops / (kernels.BF16_TFLOPS * 1e12),
        }
        bound = max(times, key=lambda name: times[name])
        return times[bound], bound


def make_record(
    bench: str, case: dict[str, Any], times: dict[str, float], ours: str, work: Work, runs: int
) -> dict[str, Any]:
    """A result record; the times of all others are its baselines."""
    baselines = {name: seconds for name, seconds in times.items() if name != ours}
    made = {"bench": bench, "baselines": baselines, "runs": runs}
    made |= {"bytes": round(work.bytes), "flops": round(work.flops)}
    floor, bound = work.floor()
    if ours in times:
        return kernels.gpu_record(case, times[ours], floor, bound) | made
    device = torch.cuda.get_device_name()
    return {"case": case, "floor_seconds": floor, "bound": bound, "device": device} | made
