"""A float32 engine behind the server: image features travel as FP32, and greedy answers are those
of transformers' own model."""

from __future__ import annotations

import importlib.util
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from m3trt.preprocess.detokenizer import Detokenizer
from m3trt.preprocess.prompt import Preprocessor
from m3trt.serve.demo import draw_picture

pytestmark = pytest.mark.full

COUNT = 32


@pytest.fixture(scope="module")
def float32_server(
    start_server: Callable[..., Any],
    make_engine: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("float32")
    server = start_server(make_engine("float32"), folder)
    yield server
    assert server.stop(signal.SIGTERM) == 0
    assert server.leftovers() == []


@pytest.fixture(scope="module")
def transformers_model(checkpoint_dir: Path, importable_torchvision: None) -> Any:
    """transformers' model in float32, with the checkpoint's router as the engine has it."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(
        checkpoint_dir, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    _parity().restore_router(model, checkpoint_dir, torch.float32)
    return model


def _parity() -> ModuleType:
    path = Path(__file__).resolve().parents[1] / "parity" / "conftest.py"
    spec = importlib.util.spec_from_file_location("parity_oracle", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("pictures", [0, 2], ids=["text", "two-pictures"])
def test_greedy_answers_are_those_of_transformers(
    float32_server: Any,
    transformers_model: Any,
    make_engine: Callable[[str], Path],
    pictures: int,
) -> None:
    import torch

    preprocessor = Preprocessor.load(make_engine("float32"))
    pixels = [draw_picture(70)] * pictures
    prompt = preprocessor.process("What is this?", pixels)
    config = preprocessor.config
    ids = np.where(prompt.input_ids < config.vocab_size, prompt.input_ids, config.image_token_id)
    images = {}
    if prompt.images is not None:
        images["pixel_values"] = torch.from_numpy(prompt.images.patches)
        images["image_grid_thw"] = torch.tensor(prompt.images.grids)
    with torch.no_grad():
        output = transformers_model.generate(
            input_ids=torch.from_numpy(ids)[None].long(),
            attention_mask=torch.ones(1, ids.size, dtype=torch.long),
            max_new_tokens=COUNT,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            **images,
        )
    expected = output[0, ids.size :].tolist()
    text = Detokenizer(preprocessor.tokenizer).text([], expected, final=True)
    assert len(text) > COUNT
    values = {"text_input": "What is this?", "max_tokens": COUNT, "end_id": -1}
    if pictures:
        values["image_bytes_input"] = np.stack(pixels)[np.newaxis]
    for model in ("ensemble", "tensorrt_llm_bls"):
        answer = float32_server.stream(model, return_num_output_tokens=True, **values)
        assert answer.text == text
        assert answer.arrays[-1]["num_output_tokens"].item() == COUNT
