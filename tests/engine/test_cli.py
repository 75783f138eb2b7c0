"""`python -m m3trt.build`: options, errors, exit codes."""

from __future__ import annotations

import pytest
from m3trt.build import library, targets
from m3trt.build.__main__ import main
from m3trt.build.configuration import BuildConfig
from m3trt.build.engine_dir import EngineDir
from m3trt.build.library import LibraryError
from m3trt.build.targets import Targets, choose_targets

pytestmark = pytest.mark.smoke


def run(checkpoint, output, *options):
    return main(["--checkpoint_dir", str(checkpoint), "--output_dir", str(output), *options])


def test_reference_build(checkpoint, tmp_path, capsys):
    output = tmp_path / "engine"
    options = ["--max_batch_size", "4", "--max_num_tokens", "64", "--gather_context_logits"]
    assert run(checkpoint(), output, "--runtime", "reference", *options) == 0
    assert capsys.readouterr().out == f"{output}\n"
    build = EngineDir.load(output).build
    assert (build.max_batch_size, build.max_num_tokens, build.max_logit_rows) == (4, 64, 64)


def test_trtllm_spelling_of_the_multimodal_limit(checkpoint, tmp_path):
    options = ["--runtime", "reference", "--max_prompt_embedding_table_size", "64"]
    assert run(checkpoint(), tmp_path / "engine", *options) == 0
    assert EngineDir.load(tmp_path / "engine").build.max_multimodal_len == 64


def test_dry_run_writes_nothing(checkpoint, tmp_path, capsys):
    assert run(checkpoint(tp_size=2), tmp_path / "engine", "--dry_run") == 0
    out = capsys.readouterr().out
    assert "rank0, rank1: 44 nodes" in out
    assert "max_pages: 32767" in out
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max_seq_len", "5000"], "max_seq_len 5000 is more than 4096"),
        (["--max_seq_len", "1"], "max_seq_len is 1, expected a number of at least 2"),
        (["--max_batch_size", "0"], "max_batch_size is 0"),
        (["--input_timing_cache", "none"], "none is no directory"),
        (["--input_timing_cache", "."], "tensorrt_rtx has no timing cache"),
        (["--runtime", "reference", "--compute_capabilities", "80"], "reference builds for no GPU"),
        (["--max_num_tokens", "100000000"], "lower max_num_tokens"),
        (["--max_multimodal_len", "0"], "max_multimodal_len is 0"),
        (["--plugin_library", "none.so"], "none.so does not exist: run `make plugins`"),
        (["--plugin_library", __file__], "is not a plugin library of this project"),
        (["--runtime", "tensorrt"], "tensorrt cannot be imported, found only"),
    ],
)
def test_errors_are_one_sentence_and_leave_nothing(checkpoint, tmp_path, capsys, options, message):
    runtime = [] if "--runtime" in options else ["--runtime", "tensorrt_rtx"]
    assert run(checkpoint(), tmp_path / "engine", *runtime, *options) == 1
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_existing_output_is_left_alone(checkpoint, tmp_path, capsys):
    output = tmp_path / "engine"
    output.mkdir()
    (output / "precious").write_text("1")
    assert run(checkpoint(), output, "--runtime", "reference") == 1
    assert f"{output} already exists" in capsys.readouterr().err
    assert (output / "precious").read_text() == "1"


def test_incomplete_checkpoint(checkpoint, tmp_path, capsys):
    assert run(tmp_path / "none", tmp_path / "engine") == 1
    assert "expected a directory written by m3trt.convert" in capsys.readouterr().err
    source = checkpoint(tp_size=2)
    (source / "rank1.safetensors").unlink()
    assert run(source, tmp_path / "engine", "--runtime", "reference") == 1
    assert "lacks ['rank1.safetensors']" in capsys.readouterr().err


def test_weights_that_do_not_fit_the_config_fail_the_build(
    checkpoint, write_weights, tmp_path, capsys
):
    source = checkpoint()
    write_weights(source / "vision.safetensors", {})
    assert run(source, tmp_path / "engine", "--runtime", "reference") == 1
    assert "vision.safetensors does not fit vision.onnx" in capsys.readouterr().err
    assert not (tmp_path / "engine").exists()


def test_config_only_checkpoint_builds_without_weight_links(checkpoint, tmp_path):
    assert run(checkpoint(weights=False), tmp_path / "engine", "--runtime", "reference") == 0
    assert not list((tmp_path / "engine").glob("*.safetensors"))


@pytest.mark.parametrize(
    "options",
    [
        ["--max_beam_width", "1"],
        ["--gemm_plugin", "auto"],
        ["--max_batch", "8"],  # no abbreviations
        ["--workers", "0"],
        ["--runtime", "onnxruntime"],
        ["--compute_capabilities", "sm_90"],
        ["--kv_cache_dtype", "int8"],
    ],
)
def test_unknown_options_and_values_are_refused(checkpoint, tmp_path, options):
    with pytest.raises(SystemExit) as error:
        run(checkpoint(), tmp_path / "engine", *options)
    assert error.value.code == 2


@pytest.mark.parametrize(
    ("device", "requested", "fp8", "expected"),
    [
        (None, None, False, Targets((80, 86, 89, 120), False)),
        (None, None, True, Targets((89, 120), False)),
        (120, None, True, Targets((120,), True)),
        (120, (80,), False, Targets((80,), False)),
    ],
)
def test_targets(tiny, monkeypatch, device, requested, fp8, expected):
    monkeypatch.setattr(targets, "device_compute_capability", lambda: device)
    build = BuildConfig.for_model(tiny(), kv_cache_dtype="fp8" if fp8 else "auto")
    assert choose_targets("tensorrt_rtx", build, requested) == expected


def test_impossible_targets(tiny, monkeypatch):
    monkeypatch.setattr(targets, "device_compute_capability", lambda: None)
    build = BuildConfig.for_model(tiny(), index_cache_dtype="fp8")
    with pytest.raises(LibraryError, match=r"\[80\] have no FP8"):
        choose_targets("tensorrt_rtx", build, (80, 120))
    with pytest.raises(LibraryError, match="only where there is a GPU"):
        choose_targets("tensorrt", build, None)
    with pytest.raises(LibraryError, match="builds for the GPU at hand"):
        choose_targets("tensorrt", build, (90,))


def test_auto_prefers_tensorrt_then_rtx_then_reference(monkeypatch):
    for found in (["tensorrt", "tensorrt_rtx", "reference"], ["tensorrt_rtx", "reference"]):
        monkeypatch.setattr(library, "_exists", found.__contains__)
        assert library.resolve_runtime("auto") == found[0]
    with pytest.raises(LibraryError, match="runtime 'cpu' is unknown"):
        library.resolve_runtime("cpu")


@pytest.fixture
def rtx_libs(tmp_path, monkeypatch):
    """A stand-in for the folder of the TensorRT-RTX wheel's libraries."""
    (tmp_path / "libtensorrt_rtx.so.1").write_bytes(b"")
    spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path)]})
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: spec)
    return tmp_path


def test_rtx_library_gets_the_name_its_parser_opens(rtx_libs):
    library._link_rtx_library()
    library._link_rtx_library()
    assert (rtx_libs / "libtensorrt_rtx.so").readlink().name == "libtensorrt_rtx.so.1"
    assert len(list(rtx_libs.iterdir())) == 2


def test_read_only_rtx_folder_is_explained_unless_the_loader_finds_the_name(rtx_libs, monkeypatch):
    def refuse(*_):
        raise PermissionError("Read-only file system")

    monkeypatch.setattr(library.os, "replace", refuse)
    monkeypatch.setattr(library, "_can_open", lambda name: False)
    with pytest.raises(LibraryError, match=r"ln -s libtensorrt_rtx.so.1 .* LD_LIBRARY_PATH"):
        library._link_rtx_library()
    monkeypatch.setattr(library, "_can_open", lambda name: name == "libtensorrt_rtx.so")
    library._link_rtx_library()
