"""Engine directories: what is written, and every way in which loading refuses one."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from m3trt.build import environment as environment_module
from m3trt.build.engine_dir import EngineDir, EngineDirError
from m3trt.build.environment import Environment
from m3trt.build.library import Library, LibraryError, PluginLibrary
from m3trt.convert.layout import rank_tensors

pytestmark = pytest.mark.smoke

BUILT = Environment("tensorrt_rtx", "1.7.1", "13", "0.1.0", "aaaa", (80, 120))


def test_directory_is_complete_and_holds_no_copy_of_weights(engine, tiny):
    path = engine(tp_size=2)
    loaded = EngineDir.load(path)
    assert loaded.config == tiny(tp_size=2)
    assert loaded.build.max_pages == 32767
    assert sorted(os.listdir(path)) == [
        "config.json", "rank0.onnx", "rank0.safetensors", "rank1.onnx", "rank1.safetensors",
        "tokenizer.json", "vision.onnx", "vision.safetensors",
    ]  # fmt: skip
    link = loaded.weights(1).readlink()
    assert not link.is_absolute()
    assert loaded.weights(1).resolve() == path.parent / "checkpoint" / "rank1.safetensors"
    assert loaded.onnx(0).samefile(loaded.onnx(1))
    assert (path.stat().st_mode & 0o777) == 0o755
    loaded.check_environment("reference")
    loaded.check_weights()


def test_checkpoint_and_engine_can_move_together(engine, tmp_path):
    path = engine()
    target = tmp_path / "elsewhere"
    target.mkdir()
    shutil.move(path, target)
    shutil.move(tmp_path / "checkpoint", target)
    EngineDir.load(target / "engine").check_weights()


def test_model_without_vision(engine):
    path = engine(vision=None)
    EngineDir.load(path).check_weights()
    assert not (path / "vision.onnx").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(extra=1), r"engine: unknown keys \['extra'\]"),
        (lambda d: d.pop("environment"), r"missing keys \['environment'\]"),
        (lambda d: d.update(version=7, new=1), "engine version 7, this code reads 2"),
        (lambda d: d["build_config"].update(max_pages="9"), "max_pages is '9', expected a number"),
        (lambda d: d["build_config"].update(max_beam_width=1), r"build_config: unknown keys"),
        (lambda d: d["build_config"].pop("max_pages"), r"missing keys \['max_pages'\]"),
        (lambda d: d["pretrained_config"].update(num_heads=1), r"unknown keys \['num_heads'\]"),
        (lambda d: d["pretrained_config"].update(weight_layout=9), "weight_layout 9"),
        (lambda d: d["environment"].update(driver="1"), r"environment: unknown keys"),
        (lambda d: d["environment"].update(library="onnxruntime"), "library is 'onnxruntime'"),
        (lambda d: d.update(environment=[]), r"environment: expected an object, found \[\]"),
        (lambda d: d.update(version="1"), "engine version '1', this code reads 2"),
        (lambda d: d["build_config"].update(max_pages=True), "max_pages is True, expected"),
        (lambda d: d["build_config"].update(max_seq_len=1), "max_seq_len is 1, .* at least 2"),
        (lambda d: d["build_config"].update(gather_context_logits=1), "expected true or false"),
        (lambda d: d["pretrained_config"].update(head_size="128"), "head_size is '128', expected"),
        (lambda d: d["environment"].update(compute_capabilities=None), "compute_capabilities is N"),
    ],
)
def test_wrong_config_is_refused(engine, edit, change, message):
    path = engine()
    edit(path, change)
    with pytest.raises(EngineDirError, match=rf"config.json: .*{message}"):
        EngineDir.load(path)


@pytest.mark.parametrize(
    ("change", "file"),
    [
        (lambda d: d["pretrained_config"].update(num_attention_heads=16), "rank0.onnx"),
        (lambda d: d["pretrained_config"].update(swiglu_limit=8.0), "rank0.onnx"),
        (lambda d: d["pretrained_config"]["vision"].update(rotary_base=1e5), "vision.onnx"),
        (lambda d: d["build_config"].update(index_cache_dtype="fp8"), "rank0.onnx"),
    ],
)
def test_config_of_another_engine_is_refused(engine, edit, change, file):
    path = engine()
    edit(path, change)
    with pytest.raises(EngineDirError, match=f"{file} is not the graph of the config.json beside"):
        EngineDir.load(path)


@pytest.mark.parametrize("name", ["rank0.onnx", "vision.onnx"])
@pytest.mark.parametrize("size", [0, 1000])
def test_truncated_graph_is_refused(engine, name, size):
    path = engine()
    os.truncate(path / name, size)
    with pytest.raises(EngineDirError, match=f"{name} is .* Build the engine again"):
        EngineDir.load(path)


def test_missing_or_damaged_files_are_named(engine, edit, tmp_path):
    with pytest.raises(EngineDirError, match=r"written by m3trt.build"):
        EngineDir.load(tmp_path / "nothing")
    path = engine()
    edit(path, lambda d: d["environment"].update(library="tensorrt_rtx"))
    with pytest.raises(EngineDirError, match=r"rank0.engine is missing"):
        EngineDir.load(path)
    edit(path, lambda d: d["environment"].update(library="reference"))
    (path / "vision.onnx").unlink()
    with pytest.raises(EngineDirError, match=r"vision.onnx is missing"):
        EngineDir.load(path)
    (path / "config.json").write_text('{"version": ')
    with pytest.raises(EngineDirError, match=r"config.json: "):
        EngineDir.load(path)


def test_engine_without_weights_loads_but_says_so_before_execution(engine):
    path = engine(weights=False)
    loaded = EngineDir.load(path)
    with pytest.raises(EngineDirError, match=r"rank0.safetensors is missing: .*without weights"):
        loaded.check_weights()


def test_broken_link_names_its_target(engine, tmp_path):
    path = engine()
    (tmp_path / "checkpoint" / "rank0.safetensors").unlink()
    with pytest.raises(EngineDirError, match=r"broken link to \.\./checkpoint/rank0.safetensors"):
        EngineDir.load(path).check_weights()


def test_weights_of_another_model_list_the_first_differences(engine, tiny, write_weights, tmp_path):
    loaded = EngineDir.load(engine())
    file = tmp_path / "checkpoint" / "rank0.safetensors"
    tensors = rank_tensors(tiny())
    norm = "transformer.ln_f.weight"
    changed = {**tensors, norm: tensors[norm]._replace(shape=(65,)), "a.b": tensors[norm]}
    del changed["lm_head.weight"]
    write_weights(file, changed)
    with pytest.raises(EngineDirError) as error:
        loaded.check_weights()
    assert "checkpoint/rank0.safetensors does not fit rank0.onnx: lm_head.weight is missing;" in (
        text := str(error.value)
    )
    assert "a.b is not expected" in text
    assert f"{norm} is F32 [65], expected F32 [64]" in text
    write_weights(file, rank_tensors(tiny(dtype="float32")))
    with pytest.raises(EngineDirError, match=r"is F32 .*, expected BF16 .* and \d+ more"):
        loaded.check_weights()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda data: data[:-1], "truncated"),
        (lambda data: data[:100], "truncated"),
        (lambda data: b"", "truncated"),
        (lambda data: data[:8] + b"[" + data[9:], "header"),
    ],
)
def test_damaged_weights_are_named(engine, tmp_path, content, message):
    loaded = EngineDir.load(engine())
    file = tmp_path / "checkpoint" / "rank0.safetensors"
    file.write_bytes(content(file.read_bytes()))
    with pytest.raises(EngineDirError, match=rf"rank0.safetensors: .*{message}"):
        loaded.check_weights()


@pytest.fixture
def machine(monkeypatch):
    """A machine that has exactly what `BUILT` was built with, or something else instead."""

    def have(version="1.7.1", cuda="13", plugin="0.1.0", sha256="aaaa", device=None):
        library = Library("tensorrt_rtx", version, cuda)
        monkeypatch.setattr(environment_module, "describe", lambda name: library)
        monkeypatch.setattr(environment_module, "resolve_runtime", lambda name: name)
        monkeypatch.setattr(
            environment_module, "describe_plugins", lambda path: PluginLibrary(path, plugin, sha256)
        )
        monkeypatch.setattr(environment_module, "device_compute_capability", lambda: device)

    return have


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"version": "1.6.1"}, "built with tensorrt_rtx 1.7.1, found 1.6.1"),
        ({"cuda": "12"}, "built with CUDA 13, found 12"),
        ({"plugin": "0.2.0"}, "built with plugin library version 0.1.0, found 0.2.0"),
        ({"sha256": "bbbb"}, "built with plugin library sha256 aaaa, found bbbb"),
        ({"device": 90}, "built for compute capabilities 80, 120, the GPU has 90"),
    ],
)
def test_every_mismatch_names_both_sides(machine, tmp_path, found, message):
    machine(**found)
    assert BUILT.differences("tensorrt_rtx", tmp_path) == [message]


def test_matching_machine_has_no_differences(machine, tmp_path):
    machine(device=120)
    assert BUILT.differences("tensorrt_rtx", tmp_path) == []


def test_other_library_and_missing_plugins_are_mismatches(engine, edit, tmp_path):
    path = engine(weights=False)
    loaded = EngineDir.load(path)
    with pytest.raises(EngineDirError, match="built for reference, asked to run with tensorrt_rtx"):
        loaded.check_environment("tensorrt_rtx")
    for suffix in ("rank0.engine", "vision.engine"):
        (path / suffix).write_bytes(b"")
    edit(path, lambda d: d["environment"].update(library="tensorrt_rtx"))
    loaded = EngineDir.load(path)
    loaded.check_environment("reference")
    with pytest.raises(EngineDirError, match=r"none.so does not exist: run `make plugins`"):
        loaded.check_environment("tensorrt_rtx", tmp_path / "none.so")


def test_environment_records_nothing_for_the_reference_executor(tmp_path):
    found = Environment.current("reference", tmp_path, ())
    assert (found.library, found.cuda, found.plugin_sha256) == ("reference", None, None)
    with pytest.raises(LibraryError, match="does not exist"):
        Environment.current("tensorrt_rtx", tmp_path, ())


def test_config_is_plain_json(engine):
    data = json.loads((engine() / "config.json").read_text())
    assert list(data) == ["version", "pretrained_config", "build_config", "environment"]
