"""The parts of the MSA benches that need no GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from m3trt.bench import (
    decode,
    fp8_effect,
    kernel_library,
    msa_report,
    plots,
    prefill,
    sglang_topk,
)
from m3trt.bench import msa_steps as steps
from m3trt.bench import records as bench_records
from m3trt.bench.gather import row_lengths
from m3trt.bench.kernel_library import BLOCK, HEAD
from m3trt.bench.msa_bench import Contestants, Table, Work
from m3trt.bench.msa_steps import TP1, TP4, TP8, Pool, Step
from m3trt.bench.peers import Sglang, load_peers

pytestmark = pytest.mark.smoke


@pytest.fixture(scope="module")
def pool() -> Pool:
    torch.manual_seed(0)
    return Pool.random(220, device="cpu")


@pytest.fixture
def chunks(pool: Pool) -> Step:
    return pool.step(TP1, [1500, 6000], new=[1500, 300])


def test_cases_of_decode_are_distinct_and_cover_the_targets() -> None:
    cases = decode.full()
    seen = [(json.dumps(case.describe(False)), part) for case in cases for part in case.parts]
    assert len(seen) == len(set(seen))
    measured = {
        (case.heads, case.batch, case.context, case.q_len, part)
        for case in cases
        for part in case.parts
        if case.dtype == "bfloat16"
    }
    assert measured >= set(decode.TARGETS)
    assert {case.heads for case in cases} == {TP1, TP4, TP8}
    aimed = [case.aimed or case.dense for case in cases]
    assert aimed == sorted(aimed, reverse=True)
    assert {case.q_len for case in cases} == {1, 4}
    assert all(min(case.lengths()) >= 8192 for case in cases)


def test_cases_of_prefill_are_distinct_and_cover_the_targets() -> None:
    cases = prefill.full()
    seen = [json.dumps(case.describe("")) for case in cases]
    assert len(seen) == len(set(seen))
    measured = {(case.heads, case.new, case.prefix, part) for case in cases for part in case.parts}
    assert measured >= set(prefill.TARGETS)
    assert max(max(case.lengths) for case in cases) <= prefill.POOL_PAGES * BLOCK


def test_floors_are_those_of_the_targets() -> None:
    case = decode.Case(TP1, 8, 131072)
    assert case.work("select").floor() == (pytest.approx(57.2e-6, rel=1e-3), "bytes")
    assert case.work("attend").floor() == (pytest.approx(7.15e-6, rel=1e-3), "bytes")
    assert case.work("total").bytes == case.work("select").bytes + case.work("attend").bytes
    speculative = decode.Case(TP1, 8, 131072, q_len=4)
    assert speculative.work("attend").bytes == 4 * case.work("attend").bytes
    small = decode.Case(TP1, 8, 131072, dtype="float8_e4m3")
    assert small.work("total").bytes == case.work("total").bytes / 2
    chunk = prefill.one(TP1, 16384, 131072)
    assert chunk.work("select").floor() == (pytest.approx(3.32e-3, rel=0.01), "flops")
    assert chunk.work("attend").floor() == (pytest.approx(1.53e-3, rel=0.02), "flops")
    assert Work(4.69e12).floor() == (pytest.approx(1.0), "bytes")


@pytest.mark.parametrize("choose", [steps.random_blocks, steps.realistic_blocks])
def test_selections_are_valid(chunks: Step, choose: object) -> None:
    ids = choose(chunks, 4)  # type: ignore[operator]
    own = chunks.positions() // BLOCK
    assert ids.shape == (4, 1800, 16)
    assert ids.dtype == torch.int32
    assert ((ids >= 0).sum(2) == (own + 1).clamp(max=16)).all()
    assert (ids.amax(2) == own).all()
    ordered = ids.sort(2).values
    assert not ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any()
    last = (ids >= 0).sum(2, keepdim=True) - 1
    assert (ids.gather(2, last.long())[..., 0] == own).all()


def test_selections_differ_as_intended(pool: Pool) -> None:
    s = pool.step(TP1, [24000], new=[4000])
    unlike, alike = (
        float((ids[:, 1:] == ids[:, :-1]).float().mean())
        for ids in (steps.random_blocks(s, 4), steps.realistic_blocks(s, 4))
    )
    assert unlike < 0.3
    assert alike > 0.8


def test_a_wrong_selection_is_found(pool: Pool) -> None:
    s = pool.step(TP4, [100 * BLOCK - 7])
    scores = steps.block_scores(s, 0)
    assert scores.shape == (1, 100)
    scores[:, -1] = torch.inf
    best = scores.topk(17).indices.int()
    steps.check_selection(best[:, None, :16], s, 0)
    with pytest.raises(AssertionError):
        steps.check_selection(best[:, None, 1:], s, 0)  # without the own block
    worst = torch.cat([best[:, :15], scores.argmin(1, keepdim=True).int()], 1)
    with pytest.raises(AssertionError):
        steps.check_selection(worst[:, None], s, 0)
    with pytest.raises(AssertionError):
        steps.check_selection(best[:, None, [0] * 16], s, 0)  # one block 16 times


def test_a_wrong_output_is_found(pool: Pool) -> None:
    s = pool.step(TP8, [3000, 700], q_len=2)
    assert steps.request_of(s, 3) == (1, 699)
    ids = steps.random_blocks(s, 1)
    out = torch.stack([steps.reference_attention(s, n, ids) for n in range(4)])
    steps.check_attention(out.view(4, -1), s, 3, ids)
    dense = steps.reference_attention(s, 3)
    torch.testing.assert_close(out[3], dense)  # fewer than 16 blocks: all of them
    with pytest.raises(AssertionError, match="relative error"):
        steps.check_attention(out * 1.1, s, 3, ids)


def test_requests_share_a_small_pool(pool: Pool) -> None:
    lengths = [150 * BLOCK, 100 * BLOCK]
    assert steps.shared_pages(lengths, pool)
    s = pool.step(TP1, lengths)
    assert s.batch.table.max() < 220
    assert s.batch.table.shape[1] * BLOCK % steps.ROUNDED == 0
    assert (s.batch.table[0, :150] >= 0).all()
    assert (s.batch.table[1, 100:] == -1).all()
    assert s.prefix.tolist() == [150 * BLOCK - 1, 100 * BLOCK - 1]


def test_sglang_finds_its_tokens(pool: Pool) -> None:
    s = pool.step(TP1, [300])
    slots = Sglang.slots(s.batch.table, 2 * BLOCK)
    position = 200
    k = s.kv_cache.view(-1, 4, HEAD)[slots[0, position]]
    page = s.batch.table[0, position // BLOCK]
    assert (k == s.kv_cache[page, 0, position % BLOCK]).all()


def test_peers_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"m3trt\.bench\.peers"):
        load_peers(tmp_path)


def test_their_kernel_is_cut_out(tmp_path: Path) -> None:
    header = tmp_path / "x.cuh"
    header.write_text('#include "theirs.h"\nnamespace {\nint kernel;\n// Launchers\nint host;\n')
    unit = sglang_topk.source(header)
    assert "int kernel;" in unit
    assert "theirs.h" not in unit
    assert "int host;" not in unit


def test_gather_lengths_are_those_of_the_strided_view(pool: Pool) -> None:
    s = pool.step(TP1, [24000, 300], q_len=2)
    ids = steps.random_blocks(s, 4)
    lengths = row_lengths(s, ids)
    full = [15 * BLOCK + position % BLOCK + 1 for position in (23998, 23999)]
    assert lengths.view(4, 4)[:, 0].tolist() == [*full, 299, 300]


def test_fp8_figures(pool: Pool) -> None:
    same = torch.arange(16).expand(1, 2, 16)
    other = same.clone()
    other[0, 0, 3] = 99
    assert fp8_effect.overlap(same, same) == 1
    assert fp8_effect.overlap(same, other) == pytest.approx(29 / 30)
    assert fp8_effect.error(torch.full((3,), 1.1), torch.ones(3)) == pytest.approx(0.1)
    cache, scale = fp8_effect.quantized(pool.index[:2])
    real = cache.float() * scale
    assert ((real - pool.index[:2].float()).norm() / real.norm()) < 0.04
    s = Pool.random(40, device="cpu").step(TP1, [2048, 2048])
    fp8_effect.structure(s)
    scores = steps.block_scores(s, 0)
    assert (scores.amax(1) > 1.2 * scores.median(1).values).all()  # queries are about some blocks


def test_a_line_says_how_much_faster(capsys: pytest.CaptureFixture[str]) -> None:
    case = decode.Case(TP1, 8, 131072)
    key = (TP1, 8, 131072, 1, "select")
    record = {
        "bench": "decode_index_select",
        "case": case.describe(False),
        "seconds": 6e-5,
        "floor_seconds": 5.72e-5,
        "baselines": {"vLLM 0.24.0": 7.8e-5},
    }
    Table(decode.TARGETS).line(key, record)
    Table(decode.TARGETS).line(key, {"bench": "x", "case": case.describe(False), "error": "bad"})
    first, second = capsys.readouterr().out.splitlines()
    assert "64/4/4  batch 8 context 131072 q_len 1: 60.0 us, floor 57.2 us, target 64.0 us" in first
    assert "vLLM 0.24.0 78.0 us (1.30x)" in first
    assert second.endswith("bad")


@pytest.mark.parametrize("main", [decode.main, prefill.main, fp8_effect.main, plots.main])
def test_commands_say_what_they_do(main: object, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])  # type: ignore[operator]
    assert stopped.value.code == 0
    assert "python -m m3trt.bench." in capsys.readouterr().out


def records() -> dict[str, list[msa_report.Record]]:
    common = {"device": "GPU", "commit": "abc", "floor_seconds": 1e-6, "flops": 1e6, "bytes": 1e5}
    made: dict[str, list[msa_report.Record]] = {"fp8_effect": []}
    for bench in decode.PARTS.values():
        made[bench] = [
            common
            | {
                "bench": bench,
                "case": decode.Case(TP1, batch, context).describe(False),
                "seconds": 2e-6 * batch,
                "baselines": {"vLLM 0.24.0": 5e-6 * batch},
            }
            for batch in (1, 8)
            for context in (8192, 131072)
        ]
    for bench in prefill.PARTS.values():
        chosen = bench in ("prefill_attention", "prefill_invert")
        selections = ("random", "clustered") if chosen else ("",)
        made[bench] = [
            common
            | {
                "case": prefill.one(TP1, new, 32768).describe(selection),
                "seconds": 2e-3,
                "baselines": {"FlashAttention-3": 8e-3},
            }
            for selection in selections
            for new in (512, 16384)
        ]
    first = made["decode_total"][0]
    made["decode_total"][0] = {"case": first["case"], "error": "too large", "bench": "decode_total"}
    made["decode_total"][0] |= {"device": "GPU", "commit": "abc"}
    captured = first | {"case": first["case"] | {"captured_for": 1 << 20}}
    captured["baselines"] = {"ours, captured for 8k": 1.9e-6}
    made["decode_total"].append(captured)
    return made


def test_tables_join_the_parts(tmp_path: Path) -> None:
    made = records()
    figures = {"selection_overlap": 0.987, "attention_error": 0.024, "total_error": 0.031}
    taken = {"device": "GPU", "commit": "abc"}
    made["fp8_effect"] = [{"case": {"data": "random", "context": 8192}} | figures | taken]
    (tmp_path / "msa_decode.png").touch()
    text = "\n".join(msa_report.sections(made, tmp_path))
    assert "| 64/4/4 | bf16 | 8 | 131,072 | 1 | 16 us | - | 1 us | 6% | 40 us (2.50x) |" in text
    assert "| 64/4/4 | bf16 | 1 | 8,192 | 1 | too large | 9 us | - | - | - |" in text
    assert "| 64/4/4 | bf16 | 512 | 32,768 | random | 2 ms | 1 us | 0% | 8 ms (4.00x) |" in text
    assert "ours 2 us, captured for 8k 1.9 us." in text
    assert "| random | 8,192 | 98.7% | 2.4% | 3.1% |" in text
    assert "in one chain, batch 1 on 131,072" not in text  # 2 us, asked 15
    assert "sparse attention alone, batch 8 on 131,072: 16 us, asked 11 us" in text
    assert "](msa_decode.png)" in text
    assert "msa_prefill.png" not in text
    empty = {bench: [] for bench in made}
    assert msa_report.sections(empty, tmp_path / "none") == []


def test_rows_go_from_short_to_long() -> None:
    made = records()["decode_index_select"]
    made[1]["case"]["q_heads"] = 16
    made[2]["case"]["dtype"] = "float8_e4m3"
    assert [made.index(record) for record in sorted(made, key=msa_report.order)] == [0, 3, 2, 1]


def test_pictures_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = records()
    monkeypatch.setattr(plots, "load", lambda bench: made[bench])
    assert plots.main(["--output_dir", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == set(msa_report.PICTURES)
    assert all(path.read_bytes()[1:4] == b"PNG" for path in tmp_path.iterdir())


class Reference:
    """A contestant that selects and attends in fp32, for a few tokens."""

    name = "ours"

    def retune(self) -> None:
        """Nothing to forget."""

    @staticmethod
    def tokens(s: Step) -> set[int]:
        return {0, len(s.q) // 2, len(s.q) - 1}

    def select(self, s: Step) -> Callable[[], torch.Tensor]:
        ids = torch.full((s.index_q.shape[1], len(s.q), 16), -1, dtype=torch.int32)
        for token in self.tokens(s):
            scores = steps.block_scores(s, token)
            scores[:, -1] = torch.inf
            best = scores.topk(min(16, scores.shape[1])).indices.int()
            ids[:, token, : best.shape[1]] = best
        return lambda: ids

    def attend(self, s: Step) -> Callable[[torch.Tensor], torch.Tensor]:
        def call(ids: torch.Tensor) -> torch.Tensor:
            out = torch.full_like(s.q, torch.nan)
            for token in self.tokens(s):
                out[token] = steps.reference_attention(s, token, ids).to(out)
            return out

        return call

    def invert(self, s: Step, ids: torch.Tensor) -> Callable[[], None]:
        assert ids.shape[1] == len(s.q)
        return lambda: None

    def dense(self, s: Step) -> Callable[[], torch.Tensor]:
        out = torch.full_like(s.q, torch.nan)
        for token in self.tokens(s):
            out[token] = steps.reference_attention(s, token).to(out)
        return lambda: out


class Slower(Reference):
    name = "vLLM 0.24.0"


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Runs of the benches without a GPU: every call takes a millisecond; records land here."""

    def graph_seconds(calls: list[Callable[[], object]], **_: int) -> float:
        for call in calls:
            call()
        return 1e-3

    def gpu_record(case: object, seconds: float, floor: float, bound: str) -> dict[str, object]:
        return {"case": case, "seconds": seconds, "floor_seconds": floor, "bound": bound}

    random = Pool.random
    monkeypatch.setattr(Pool, "random", lambda pages: random(40, device="cpu"))
    monkeypatch.setattr(kernel_library, "graph_seconds", graph_seconds)
    monkeypatch.setattr(kernel_library, "gpu_record", gpu_record)
    monkeypatch.setattr(prefill, "elapsed", lambda call: 1e-3)
    monkeypatch.setattr(bench_records, "RESULTS", tmp_path)
    monkeypatch.setattr(steps, "MOST_COPIES", 2)
    monkeypatch.setattr(decode, "K", 1)
    monkeypatch.setattr(decode, "M", 4096)
    return tmp_path


def read(folder: Path, bench: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / f"{bench}.jsonl").read_text().splitlines()]


def test_decode_runs_and_records(on_cpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "gathered", lambda ours, s, ids: lambda: None)
    who = Contestants(Reference(), [Slower()], Reference())
    cases = [
        decode.Case(TP8, 2, 2500, q_len=2, parts=decode.ALL, dense=True),
        decode.Case(TP1, 1, 700, dtype="float8_e4m3", parts=decode.ALL, dense=True),
    ]
    assert decode.run(cases, who) == 0
    attention = read(on_cpu, "decode_attention")
    assert attention[0]["baselines"].keys() == {"vLLM 0.24.0", "gather, then dense"}
    total = read(on_cpu, "decode_total")
    assert total[2]["case"]["captured_for"] == 4096
    assert "vLLM 0.24.0, captured for 8k" in total[2]["baselines"]
    assert total[0]["baselines"].keys() == {
        *("vLLM 0.24.0", "our dense kernel", "FlashAttention-3"),
    }
    assert "FlashAttention-3, bf16" in total[1]["baselines"]
    assert [record["runs"] for record in read(on_cpu, "decode_index_select")] == [7, 7]


def test_prefill_runs_and_records(on_cpu: Path) -> None:
    who = Contestants(Reference(), [Slower()], Reference())
    cases = [prefill.one(TP8, 200, 2400), prefill.Case(TP1, (3, 130), (0, 500), dense=False)]
    assert prefill.run(cases, who) == 0
    attention = read(on_cpu, "prefill_attention")
    assert [record["case"]["selection"] for record in attention] == ["random", "clustered"] * 2
    assert read(on_cpu, "prefill_invert")[0]["baselines"] == {}
    total = read(on_cpu, "prefill_total")
    assert "FlashAttention-3" in total[0]["baselines"]
    assert "FlashAttention-3" not in total[1]["baselines"]


def test_no_new_case_after_the_limit(on_cpu: Path) -> None:
    assert prefill.run([prefill.one(TP8, 5, 300)], Contestants(Reference()), limit=-1) == 0
    assert list(on_cpu.iterdir()) == []


def test_a_wrong_result_is_a_record_with_an_error(on_cpu: Path) -> None:
    class Wrong(Reference):
        def attend(self, s: Step) -> Callable[[torch.Tensor], torch.Tensor]:
            return lambda ids: torch.ones_like(s.q)

    assert prefill.run([prefill.one(TP8, 5, 300)], Contestants(Wrong())) == 1
    assert decode.run([decode.Case(TP8, 1, 300, parts=("attend",))], Contestants(Wrong())) == 1
    for bench in ("prefill_total", "decode_attention"):
        (record,) = read(on_cpu, bench)
        assert "relative error" in record["error"]
        assert "seconds" not in record
