"""Build limits: defaults, contradictions, and the refusal of tensors of 2**31 elements."""

from __future__ import annotations

import pytest
from m3trt.build.configuration import BuildConfig, most_pages
from m3trt.build.network import build_text_network
from m3trt.build.profiles import check_sizes, input_ranges, text_dimensions, vision_dimensions
from m3trt.build.vision_network import build_vision_network
from m3trt.convert.configuration import ConfigError

pytestmark = pytest.mark.smoke


def test_defaults_follow_the_model(tiny):
    build = BuildConfig.for_model(tiny())
    assert build.max_pages == 16383  # 2 * 128 * 4 * 128 elements a page
    assert build.max_seq_len == 4096
    assert build.max_logit_rows == 64
    assert BuildConfig.for_model(tiny(tp_size=8)).max_pages == 65535
    assert BuildConfig.for_model(tiny(vision=None)).max_multimodal_len == 0
    long = BuildConfig.for_model(tiny(max_position_embeddings=1 << 30))
    assert long.max_seq_len == 16383 * 128
    assert BuildConfig.for_model(tiny(), gather_context_logits=True).max_logit_rows == 2048


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_batch_size": 0}, "max_batch_size is 0"),
        ({"max_num_tokens": 4}, "max_num_tokens 4 is less than max_batch_size 8"),
        ({"max_seq_len": 4097}, "max_seq_len 4097 is more than 4096"),
        ({"max_seq_len": -1}, "max_seq_len is -1"),
        ({"max_pages": 4, "max_seq_len": 513}, "4 pages of 128 tokens"),
        ({"max_multimodal_len": -1}, "max_multimodal_len is -1"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype is 'int8'"),
    ],
)
def test_contradictions_are_refused(tiny, limits, message):
    with pytest.raises(ConfigError, match=message):
        BuildConfig.for_model(tiny(), **limits)


def test_multimodal_tokens_need_vision(tiny):
    with pytest.raises(ConfigError, match="no vision tower"):
        BuildConfig.for_model(tiny(vision=None), max_multimodal_len=1)
    build = BuildConfig.for_model(tiny(), max_multimodal_len=0)
    with pytest.raises(ConfigError, match="max_multimodal_len is 0"):
        vision_dimensions(tiny(), build)


def test_json_round_trip_is_strict(tiny):
    build = BuildConfig.for_model(tiny(), index_cache_dtype="fp8")
    data = build.to_json()
    assert BuildConfig.from_json(data) == build
    with pytest.raises(ConfigError, match=r"unknown keys \['max_beam_width'\]"):
        BuildConfig.from_json({**data, "max_beam_width": 1})
    del data["max_pages"]
    with pytest.raises(ConfigError, match=r"missing keys \['max_pages'\]"):
        BuildConfig.from_json(data)


def test_one_profile_covers_prefill_and_decode(tiny):
    config = tiny()
    build = BuildConfig.for_model(config)
    model = build_text_network(config, build, 0)
    ranges = input_ranges(model, text_dimensions(config, build))
    assert ranges["input_ids"] == ((1,), (8,), (2048,))
    assert ranges["decode_rows"] == ((0, 1), (8, 1), (8, 8))
    assert ranges["prompt_embedding_table"] == ((1, 64), (1, 64), (4096, 64))
    assert ranges["kv_cache_block_offsets"] == ((1, 1), (8, 32), (8, 32))
    assert ranges["logit_rows"][0] == (0,)
    assert ranges["kv_cache_0"][2] == (16383, 2, 128, 4, 128)
    assert not any(name.startswith("transformer.") for name in ranges)
    vision = input_ranges(build_vision_network(config), vision_dimensions(config, build))
    assert vision["patches"] == ((4, 1176), (2304, 1176), (16384, 1176))
    assert vision["cu_seqlens"] == ((2,), (2,), (4097,))


@pytest.mark.parametrize(
    ("changes", "limits", "tensor", "option"),
    [
        ({}, {"max_pages": 16384}, "kv_cache_0", "max_pages"),
        ({}, {"max_num_tokens": 1 << 26}, "embedding", "max_num_tokens"),
        ({}, {"max_multimodal_len": 1 << 25}, "prompt_embedding_table", "max_multimodal_len"),
        (
            {"vocab_size": 1 << 20},
            {"gather_context_logits": True},
            "logits",
            "max_num_tokens",
        ),
        (
            {"max_position_embeddings": 1 << 20},
            {"max_batch_size": 1 << 18, "max_num_tokens": 1 << 18},
            "kv_cache_block_offsets",
            "max_batch_size or max_seq_len",
        ),
    ],
)
def test_tensors_of_two_to_the_31_elements_are_refused_by_name(
    tiny, changes, limits, tensor, option
):
    config = tiny(**changes)
    build = BuildConfig.for_model(config, **limits)
    model = build_text_network(config, build, 0)
    with pytest.raises(ConfigError, match=rf"^{tensor} could be .* lower {option}$"):
        check_sizes(model, text_dimensions(config, build))


def test_largest_page_count_fits_and_one_more_does_not(tiny):
    config = tiny()
    for pages, fits in ((most_pages(config), True), (most_pages(config) + 1, False)):
        build = BuildConfig.for_model(config, max_pages=pages)
        model = build_text_network(config, build, 0)
        if fits:
            check_sizes(model, text_dimensions(config, build))
        else:
            with pytest.raises(ConfigError, match="kv_cache_0"):
                check_sizes(model, text_dimensions(config, build))
