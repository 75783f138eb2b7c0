"""Draws the pictures of the README and of `results/README.md` from `bench/results/*.jsonl`.

python -m m3trt.bench.plots
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from m3trt.bench.records import RESULTS, Record, load, tokens

READ_BYTES, FLOPS = 4.69e12, 703e12
"""Ceilings of one H200, measured: reading, sustained bf16 products."""
TP1 = {"q_heads": 64, "kv_heads": 4, "dtype": "bfloat16"}
STYLES = {
    "ours": ("o-", "#1b6ca8"),
    "vLLM 0.24.0": ("s-", "#d1495b"),
    "SGLang 0.5.16": ("^-", "#edae49"),
    "FlashAttention-3": ("d--", "#6b6b6b"),
}
ROOFLINE = {
    "decode_index_select": ("decode, index + select", "o"),
    "decode_attention": ("decode, attention", "s"),
    "prefill_index_select": ("prefill, index + select", "^"),
    "prefill_attention": ("prefill, attention", "D"),
}

CHUNKS = (
    (8192, 0),
    (16384, 31360),
    (1404, 45440),
    (8192, 61440),
    (338, 74240),
    (10295, 75520),
    (16384, 131072),
    (16384, 157440),
    (512, 1 << 20),
    (16384, 1 << 20),
)
"""New tokens and prefix of the chunks that are shown."""


def matching(records: Sequence[Record], **wanted: Any) -> list[Record]:
    """Measured records whose case has these values."""
    return [
        record
        for record in records
        if record.get("seconds") and wanted.items() <= record["case"].items()
    ]


def times(record: Record) -> dict[str, float]:
    """Seconds of us and of those beside us."""
    return {"ours": record["seconds"], **record["baselines"]}


def decode_figure(axes: Any, records: Sequence[Record], batch: int) -> None:
    """Time of selection and attention over the context, for one batch."""
    chosen = matching(records, batch=batch, q_len=1, **TP1)
    usual = (r for r in chosen if "context" in r["case"] and "captured_for" not in r["case"])
    chosen = sorted(usual, key=_context)
    contexts = [_context(record) for record in chosen]
    for name, (line, color) in STYLES.items():
        points = [
            (x, times(r)[name]) for x, r in zip(contexts, chosen, strict=True) if name in times(r)
        ]
        if points:
            xs, ys = zip(*points, strict=True)
            axes.loglog(xs, [y * 1e6 for y in ys], line, color=color, label=name)
    floors = [record["floor_seconds"] * 1e6 for record in chosen]
    axes.loglog(contexts, floors, ":", color="black", label="reading at 4.69 TB/s")
    axes.set_title(f"Decode step of one layer, batch {batch}")
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("index + select + attention, us")
    axes.set_xticks(contexts, [tokens(x) for x in contexts])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()


def _context(record: Record) -> int:
    return int(record["case"]["context"])


def prefill_figure(axes: Any, records: Sequence[Record]) -> None:
    """Time of selection and attention of some chunks, by their prefix."""
    found = {(r["case"]["new"], r["case"]["prefix"]): r for r in matching(records, **TP1)}
    chosen = [found[chunk] for chunk in CHUNKS if chunk in found]
    width = 0.8 / len(STYLES)
    for i, (name, (_, color)) in enumerate(STYLES.items()):
        bars = [(x, times(r)[name] * 1e3) for x, r in enumerate(chosen) if name in times(r)]
        if bars:
            xs, ys = zip(*bars, strict=True)
            axes.bar([x + (i - 1.5) * width for x in xs], ys, width, color=color, label=name)
    cases = [record["case"] for record in chosen]
    names = [f"{tokens(case['new'])}\non {tokens(case['prefix'])}" for case in cases]
    axes.set_yscale("log")
    axes.set_title("Prefill chunk of one layer")
    axes.set_xlabel("new tokens on prefix")
    axes.set_ylabel("index + select + attention, ms")
    axes.set_xticks(range(len(names)), names)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    if chosen:
        axes.legend()


def roofline(axes: Any, records: dict[str, Sequence[Record]]) -> None:
    """Operations a second over operations a byte; filled: ours, hollow: vLLM's."""
    intensity = [0.5 * 2**i for i in range(18)]
    axes.loglog(intensity, [min(FLOPS, x * READ_BYTES) / 1e12 for x in intensity], color="black")
    for i, (bench, (label, marker)) in enumerate(ROOFLINE.items()):
        color = f"C{i}"
        for record in matching(records.get(bench, ()), **TP1):
            x = record["flops"] / record["bytes"]
            for name, fill in (("ours", color), ("vLLM 0.24.0", "none")):
                seconds = times(record).get(name)
                if seconds:
                    rate = record["flops"] / seconds / 1e12
                    axes.plot(x, rate, marker, markerfacecolor=fill, color=color, markersize=6)
        axes.plot([], [], marker, color=color, label=label)
    axes.set_title("Roofline, one H200 (hollow: vLLM 0.24.0)")
    axes.set_xlabel("operations per byte that must be read or written")
    axes.set_ylabel("TFLOP/s")
    axes.grid(alpha=0.3)
    axes.legend()


def draw(path: Path, figures: Sequence[Callable[[Any], None]], width: float = 6.4) -> None:
    """Save figures side by side."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    picture = Figure(figsize=(width * len(figures), 4.4), dpi=100, layout="constrained")
    FigureCanvasAgg(picture)
    for figure, axes in zip(
        figures, picture.subplots(1, len(figures), squeeze=False)[0], strict=True
    ):
        figure(axes)
    picture.savefig(path, metadata={"Software": None})


def main(argv: Sequence[str] | None = None) -> int:
    """Draw msa_decode.png, msa_prefill.png and msa_roofline.png beside the records."""
    parser = argparse.ArgumentParser(prog="python -m m3trt.bench.plots", description=__doc__)
    parser.add_argument("--output_dir", type=Path, default=RESULTS, help="default: %(default)s")
    folder = parser.parse_args(argv).output_dir
    decode, prefill = load("decode_total"), load("prefill_total")
    draw(
        folder / "msa_decode.png",
        [lambda axes: decode_figure(axes, decode, 1), lambda axes: decode_figure(axes, decode, 8)],
    )
    draw(folder / "msa_prefill.png", [lambda axes: prefill_figure(axes, prefill)], width=10)
    draw(
        folder / "msa_roofline.png",
        [lambda axes: roofline(axes, {bench: load(bench) for bench in ROOFLINE})],
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
