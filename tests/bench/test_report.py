"""The README's speed section and `bench/results/README.md` come from the records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from m3trt.bench import msa_report, records, report, step_report, summary

pytestmark = pytest.mark.smoke


def test_both_files_are_current() -> None:
    assert report.main(["--check"]) == 0


@pytest.mark.parametrize("name", ["README", "FULL"])
def test_a_stale_file_is_found_and_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for each in ("README", "FULL"):
        copy = tmp_path / f"{each}.md"
        copy.write_bytes(getattr(report, each).read_bytes())
        monkeypatch.setattr(report, each, copy)
    stale = tmp_path / f"{name}.md"
    current = stale.read_text()
    stale.write_text(current.replace("x) |", "y) |"))
    assert report.main(["--check"]) == 1
    assert f"{name}.md is not current" in capsys.readouterr().err
    assert report.main([]) == 0
    assert stale.read_text() == current


def test_the_readme_has_what_a_newcomer_needs() -> None:
    text = summary.section()
    assert len(text.splitlines()) < 60
    assert "](bench/results/README.md)" in text
    for row in ("| 128k | 8 |", "| 1M | 1 |", "| 16k on 128k |", "| 8k on 0 |"):
        assert row in text
    prose = [line for line in text.splitlines() if not line.startswith("|")]
    assert max(map(len, prose)) <= 100


def test_every_record_has_a_row() -> None:
    text = report.full()
    records_of_steps = sorted(records.load("slice"), key=report.order)
    for more in (step_report.breakdowns(records_of_steps), step_report.engines(records_of_steps)):
        assert more in text
        text = text.replace(more, "")
    benches = (*msa_report.TITLES, *report.SECTIONS)
    cases = [r["case"] for bench in benches for r in summary.steps(records.load(bench))]
    plain = [r for r in records.load_all("slice") if r["commit"] == summary.PLAIN_MSA]
    before = [r for r in summary.steps(plain) if r["case"]["model"] == "slice"]
    captured = [case for case in cases if "captured_for" in case]
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    heads = sum(set(line) <= set("|- ") for line in rows)
    more = len(records.load("fp8_effect")) + len(summary.dense())
    assert len(rows) - 2 * heads == len(cases) - len(captured) + len(before) + more


def test_what_was_slower_is_said() -> None:
    text = " ".join(summary.section().split())
    for bench in msa_report.TITLES:
        for record in records.load(bench):
            for name, seconds in record.get("baselines", {}).items():
                if name in msa_report.OTHERS and seconds < record["seconds"]:
                    ratio = f"{seconds / record['seconds']:.2f}x the speed of {name}"
                    assert f"{msa_report.named(record['case'])}: {ratio}" in text


def test_newest_record_of_a_case_counts(tmp_path: Path) -> None:
    case = {"batch": 1, "shared_pages": False}
    made = [{"case": case, "seconds": s} for s in (1.0, 2.0)] + [{"case": {"batch": 2}}]
    made[0]["baselines"] = {"torch": 3.0}
    (tmp_path / "moe.jsonl").write_text("".join(json.dumps(record) + "\n" for record in made))
    loaded = report.load("moe", tmp_path)
    assert [record.get("seconds") for record in loaded] == [2.0, None]
    assert loaded[0]["earlier_baselines"] == {"torch": 3.0}
    assert report.read_back(tmp_path) == ""


def test_table_says_what_failed_and_what_was_beside() -> None:
    common = {"device": "GPU", "commit": "abc"}
    measured = {
        "case": {"batch": 1024, "dtype": "bfloat16"},
        "seconds": 1.5e-5,
        "floor_seconds": 1.25e-3,
        "rate": 3.456,
        "rate_unit": "TB/s",
        "baselines": {"torch": 2.0},
        "gemms_seconds": 1e-5,
    }
    failed = {"case": {"batch": 2, "dtype": "bfloat16"}, "error": "out of memory"}
    text = report.table("Title", [measured | common, failed | common])
    assert text.startswith("### Title\n\nGPU; bfloat16; commit abc\n")
    beside = "its GEMMs alone: 10 us; torch: 2 s"
    assert f"| batch 1,024 | 15 us | 1.25 ms | 3.46 TB/s | {beside} |" in text
    assert "| batch 2 | out of memory | - | - | - |" in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (3e-10, "0.0003 us"), (9.996e-4, "1000 us"), (0.5, "500 ms"), (3.678, "3.68 s")],
)
def test_duration(seconds: float | None, text: str) -> None:
    assert report.duration(seconds) == text


def test_dense_attention_is_read_from_the_records_of_msa() -> None:
    peers = {"vLLM 0.24.0": 1e-3}
    both = peers | {msa_report.OUR_DENSE: 2e-3, msa_report.DENSE: 3e-3}
    decode = {"batch": 8, "context": 131072, "q_len": 1, "index_heads": 4, "shared_pages": False}
    chunk = {"new": 8192, "prefix": 0, "index_heads": 4}
    made = [
        {"case": decode | summary.TP1, "seconds": 1e-4, "baselines": both, "commit": "abc"},
        {"case": chunk | summary.TP1, "seconds": 1e-4, "baselines": both, "commit": "abc"},
        {"case": chunk | summary.TP1, "seconds": 1e-4, "baselines": peers},
        {"case": decode | summary.TP1 | {"captured_for": 1 << 20}, "baselines": both},
        {"case": chunk | summary.TP1 | {"new": "[1, 2]", "prefix": "[3, 4]"}, "baselines": both},
    ]
    of_decode, of_chunk = msa_report.dense_records(made)
    case = {"batch": 8, "context": 131072, "q_len": 1, **summary.TP1, "phase": "decode"}
    assert of_decode["case"] == case
    assert (of_decode["commit"], of_decode["seconds"]) == ("abc", 2e-3)
    assert of_decode["baselines"] == {msa_report.DENSE: 3e-3}
    assert of_decode["rate"] == pytest.approx(8 * 131072 * 2048 / 2e-3 / 1e12)
    assert of_decode["rate"] * 2e-3 == pytest.approx(4.69 * of_decode["floor_seconds"])
    assert of_chunk["rate"] * 2e-3 == pytest.approx(703 * of_chunk["floor_seconds"])
    assert "decode 1.50x to 1.50x" in summary.dense_sentence([of_decode])


def test_attention_alone_beside_vllm() -> None:
    def record(selection: str, seconds: float, **baselines: float) -> records.Record:
        case = {"new": 8192, "prefix": 0, "selection": selection} | summary.TP1
        return {"case": case, "seconds": seconds, "baselines": baselines}

    vllm = {msa_report.PEERS[0]: 3e-3}
    found = [record("random", 1.5e-3, **vllm), record("clustered", 1e-3, **vllm)]
    text = summary.attention_sentence(found)
    assert "random selections 8k on 0 1.5 ms (2.00x); clustered selections" in text
    assert text.endswith("8k on 0 1 ms (3.00x).")
    assert summary.attention_sentence([record("random", 1.5e-3)]) == ""  # vLLM did not run


def step(batch: int, seconds: float = 1e-3, **more: object) -> records.Record:
    case = {"model": "slice", "tp_size": 1, "step": "decode", "batch": batch, "context": 131072}
    ops = {"MoE": {"seconds": 9e-4, "launches": 1}, "TensorRT": {"seconds": 1e-4, "launches": 1}}
    common = {"commit": "abc", "device": "GPU", "floor_seconds": 5e-4, "floors": {"MoE": 5e-4}}
    record: records.Record = common | {"case": case, "seconds": seconds, "ops": ops}
    return record | more


def test_each_op_has_its_share_rate_and_floor() -> None:
    added = {"MoE": {"seconds": 9e-4, "added_seconds": 6e-4, "launches": 1}}
    work = {"MoE": {"amount": 2.4e9, "unit": "bytes"}}
    experts = {"expected": 28.7, "emulated": 28.4}
    text = step_report.breakdowns([step(1), step(8, ops=added, work=work, experts=experts)])
    assert "| MoE | 900 us (90.0%), floor 500 us | 600 us (100.0%), 4 TB/s, floor 500 us |" in text
    assert "| TensorRT | 100 us (10.0%) | - |" in text
    assert "| **step** | 1 ms, floor 500 us | 1 ms, floor 500 us |" in text
    assert "| distinct experts a layer | - | 28.4, at random 28.7 |" in text
    assert "(programmatic launch)" in text
    assert "plain sums (abc)" in " ".join(text.split())
    assert step_report.breakdowns([]) == ""


def test_the_slice_of_a_run_on_two_gpus_does_not_replace_the_slice() -> None:
    other = step(1, 2e-3)
    other["case"] = other["case"] | {"bench": "tensor_parallel"}
    assert step_report.alone([other, step(1)], "slice") == [step(1)]
    for each in ("39bafd6b8bbe", "46f115619619"):
        found = [r for r in records.load_all("slice") if r["commit"] == each]
        assert all(
            ("host_seconds" in r) != (r["case"].get("bench") == "tensor_parallel")
            for r in summary.steps(found)
            if r["case"]["step"] != "generate"
        )


def test_steps_that_read_fewer_experts_are_named() -> None:
    assert "Steps of abc ran with router biases of 0.1" in summary.routing_sentence([step(1)])
    assert summary.routing_sentence([step(1, router_bias=0.001)]) == ""
    assert "less work" in summary.herded_before([[step(1)], [step(1, router_bias=0.001)]])
    assert summary.herded_before([[step(1)], [step(1)]]) == ""


def test_host_memory_of_a_load_has_a_column() -> None:
    load = {"case": {"source": "disk"}, "seconds": 2.0, "host_bytes": 134e6, "device": "GPU"}
    text = report.table("Load", [load | {"commit": "abc", "largest_tensor_bytes": 2.46e9}])
    assert "| 0.134 GB | 2.46 GB |" in text


def test_all_reduces_of_every_step_of_the_rank_are_estimated() -> None:
    def reduced(rows: int, seconds: float) -> records.Record:
        case = {"op": "all_reduce", "rows": rows}
        return {"case": case, "seconds": 1.0, "estimates": {"tp 8": seconds}}

    found = [reduced(rows, rows * 1e-6) for rows in (1, 8, 32, 8192)]
    text = summary.all_reduces_sentence(found)
    assert text.endswith("as a ring 120 us, 960 us, 3.84 ms and, of the chunk, 1.97 s.")
    assert summary.all_reduces_sentence(found[:3]) == ""
