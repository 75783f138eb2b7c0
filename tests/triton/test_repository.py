"""The generated repository, and how the generator notices mistakes in its table."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from m3trt.build.engine_dir import EngineDir
from m3trt.serve.check import check_repository
from m3trt.serve.pbtxt import Enum, PbtxtError, parse, write
from m3trt.serve.repository import main as repository_main
from m3trt.serve.repository import write_repository
from m3trt.serve.table import TABLE, RepositoryError, load_table, routes

pytestmark = pytest.mark.smoke

ENGINE = {"engine_dir": "e", "feature_type": "UINT16", "hidden_size": 64, "patch_width": 1176}
VISION = frozenset({"vision"})


def ports(repository: Path, model: str, kind: str) -> dict[str, tuple[str, list[int], bool]]:
    config = parse((repository / model / "config.pbtxt").read_text())
    return {
        port["name"][0]: (port["data_type"][0], port["dims"], "optional" in port)
        for port in config[kind]
    }


def test_the_names_that_clients_know(engine_dir: Path, tmp_path: Path) -> None:
    write_repository(EngineDir.load(engine_dir), tmp_path)
    inputs = ports(tmp_path, "ensemble", "input")
    assert inputs["text_input"][:2] == ("TYPE_STRING", [1])
    assert inputs["max_tokens"][:2] == ("TYPE_INT32", [1])
    assert inputs["image_url_input"] == ("TYPE_STRING", [-1], True)
    assert inputs["image_bytes_input"] == ("TYPE_UINT8", [-1, -1, -1, -1], True)
    assert inputs["seed"] == ("TYPE_UINT64", [1], True)
    assert not any(name.startswith("_") for name in inputs)
    outputs = ports(tmp_path, "ensemble", "output")
    assert outputs["text_output"][:2] == ("TYPE_STRING", [-1])
    assert ports(tmp_path, "tensorrt_llm_bls", "input") == inputs
    assert ports(tmp_path, "tensorrt_llm_bls", "output") == outputs
    engine = ports(tmp_path, "tensorrt_llm", "input")
    assert {"input_ids", "input_lengths", "request_output_len", "stop"} <= set(engine)
    features = ports(tmp_path, "multimodal_encoders", "output")["_prompt_embedding_table"]
    assert features[0] == "TYPE_UINT16"


def test_a_float32_engine_has_other_edges(
    make_engine: Callable[[str], Path], tmp_path: Path
) -> None:
    write_repository(EngineDir.load(make_engine("float32")), tmp_path)
    assert ports(tmp_path, "multimodal_encoders", "input")["_pixel_values"][0] == "TYPE_FP32"


def test_a_text_model_has_no_encoder(
    engine_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = EngineDir.load(engine_dir)
    text_only = dataclasses.replace(engine, config=dataclasses.replace(engine.config, vision=None))
    monkeypatch.setattr(EngineDir, "load", lambda path: text_only)
    table = write_repository(EngineDir.load(engine_dir), tmp_path)
    assert "multimodal_encoders" not in [model.name for model in table.models]
    assert not any("image" in name for name in ports(tmp_path, "ensemble", "input"))
    for features in (frozenset(), VISION):
        outputs = set(routes("preprocessing", features)[1])
        assert (outputs <= set(ports(tmp_path, "preprocessing", "output"))) == (not features)


def test_the_command(engine_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--engine_dir", str(engine_dir), "--output_dir", str(tmp_path / "r")]
    assert repository_main([*command, "--set", "max_queue_size=5"]) == 0
    text = (tmp_path / "r" / "tensorrt_llm" / "config.pbtxt").read_text()
    assert 'key: "max_queue_size"\n  value {\n    string_value: "5"' in text
    assert repository_main(command) == 1
    assert "is not empty" in capsys.readouterr().err


def test_an_environment_only_where_it_is_given(engine_dir: Path, tmp_path: Path) -> None:
    write_repository(EngineDir.load(engine_dir), tmp_path / "a")
    write_repository(EngineDir.load(engine_dir), tmp_path / "b", {"execution_env_path": "/opt/env"})
    for model in ("preprocessing", "tensorrt_llm"):
        config = Path(model, "config.pbtxt")
        assert "EXECUTION_ENV_PATH" not in (tmp_path / "a" / config).read_text()
        assert 'string_value: "/opt/env"' in (tmp_path / "b" / config).read_text()


def changed(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    data = json.loads(TABLE.read_text())
    change(data)
    path = tmp_path / "table.json"
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda d: d.update(extra=1), "unknown keys ['extra']", id="top-level"),
        pytest.param(lambda d: d.pop("models"), "missing keys ['models']", id="no-models"),
        pytest.param(
            lambda d: d["tensors"][0].update(shape=[1]), "unknown keys ['shape']", id="tensor-key"
        ),
        pytest.param(
            lambda d: d["tensors"][0].pop("dims"), "'text_input': missing keys ['dims']", id="dims"
        ),
        pytest.param(lambda d: d["tensors"][0].pop("to"), "goes nowhere", id="no-target"),
        pytest.param(
            lambda d: d["models"]["preprocessing"].update(count=2), "['count']", id="model-key"
        ),
        pytest.param(
            lambda d: d["settings"].pop("executor"), "needs ['executor']", id="missing-setting"
        ),
        pytest.param(
            lambda d: d["settings"].update(spare=1), "settings ['spare']", id="left-over-setting"
        ),
    ],
)
def test_mistakes_in_the_table(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    with pytest.raises(RepositoryError) as caught:
        load_table(ENGINE, VISION, path=changed(tmp_path, change))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param({"typo": "1"}, "unknown settings ['typo']", id="unknown"),
        pytest.param({"max_queue_size": "0"}, "at least 1", id="zero"),
        pytest.param({"exclude_input_in_output": "yes"}, "true or false", id="bool"),
    ],
)
def test_wrong_settings(settings: dict[str, str], message: str) -> None:
    with pytest.raises(RepositoryError) as caught:
        load_table(ENGINE, VISION, settings)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("model", "old", "new", "message"),
    [
        pytest.param("tensorrt_llm", "TYPE_INT32", "TYPE_INT64", "'max_tokens' is", id="dtype"),
        pytest.param("postprocessing", '"OUTPUT"', '"TEXT"', "no output 'OUTPUT'", id="name"),
        pytest.param("ensemble", '"_input_ids"', '"_ids"', "_input_ids", id="edge"),
        pytest.param("preprocessing", "backend:", "backend: ${x} #", "${x} was left", id="left"),
        pytest.param("ensemble", "platform:", "platform {", "expected", id="syntax"),
        pytest.param("ensemble", '"postprocessing"', '"other"', "'other' is not", id="model"),
    ],
)
def test_mistakes_in_the_files(
    engine_dir: Path, tmp_path: Path, model: str, old: str, new: str, message: str
) -> None:
    write_repository(EngineDir.load(engine_dir), tmp_path)
    path = tmp_path / model / "config.pbtxt"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(RepositoryError) as caught:
        check_repository(tmp_path)
    assert message in str(caught.value)


def test_a_missing_model_file(engine_dir: Path, tmp_path: Path) -> None:
    write_repository(EngineDir.load(engine_dir), tmp_path)
    (tmp_path / "tensorrt_llm" / "1" / "model.py").unlink()
    with pytest.raises(RepositoryError, match=r"model\.py is missing"):
        check_repository(tmp_path)


def test_protobuf_text_round_trip() -> None:
    message = {"name": 'a "b" \\ c\n', "count": [1, -2], "on": True, "kind": Enum("KIND_CPU")}
    nested = {"outer": [message, {"inner": {"x": 0}}], "tail": "#no comment"}
    found = parse(write(nested))
    assert found["outer"][0]["name"] == [message["name"]]
    assert found["outer"][0]["count"] == [1, -2]
    assert found["outer"][1]["inner"][0]["x"] == [0]
    assert found["tail"] == ["#no comment"]
    assert parse("dims: [ 1, 2 ]\ninput [ { a: 1 }, { a: 2 } ] # end")["dims"] == [1, 2]


@pytest.mark.parametrize("text", ["a {", "a: }", "}", "a: 1 2", "[", "a: ?"])
def test_text_that_is_no_protobuf(text: str) -> None:
    with pytest.raises(PbtxtError):
        parse(text)
