"""A stage: the documented example, what switches graphs off, copies, and hints for slips."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from vgraph_lab.config import ConnectorConfig, StageConfig, TargetSettings, VocoderGraphSettings
from vgraph_lab.errors import ConfigError
from vgraph_lab.qwen3_tts.settings import EXTENSIONS, TARGET_IDS, Qwen3TTSGraphKeys, StatelessTargetKeys

EXAMPLE = """
async_chunk: true
connector: {codec_chunk_frames: 25, initial_codec_chunk_frames: 1, codec_left_context_frames: 72, codec_chunk_ramp: null}
cudagraph_mode: FULL
enforce_eager: false
vocoder_cudagraph:
  max_memory_bytes: 2147483648
  log_stats: true
  num_warmups: 2
  eviction: none
  capture_batch_sizes: [1, 2, 4]
  decode_batch_max_size: 4
  targets:
    qwen3_tts.suffix: {enabled: true, enable_lazy_capture: true, max_extra_graphs: 4}
    qwen3_tts.stateless: {capture_bucket_sizes: [150, 325]}
"""


@pytest.fixture
def example(tmp_path: Path) -> StageConfig:
    path = tmp_path / "stage.yaml"
    path.write_text(EXAMPLE)
    return StageConfig.from_yaml(path)


def test_the_documented_example(example: StageConfig) -> None:
    assert example.async_chunk is True
    assert example.connector == ConnectorConfig()
    assert example.max_num_seqs == 64
    assert example.vocoder_cudagraph == VocoderGraphSettings(
        max_memory_bytes=2**31,
        log_stats=True,
        targets={
            "qwen3_tts.suffix": TargetSettings(enable_lazy_capture=True, max_extra_graphs=4),
            "qwen3_tts.stateless": TargetSettings(),
        },
    )
    assert example.extension(Qwen3TTSGraphKeys) == Qwen3TTSGraphKeys(capture_batch_sizes=(1, 2, 4), decode_batch_max_size=4)
    assert example.target_extension("qwen3_tts.stateless", StatelessTargetKeys).capture_bucket_sizes == (150, 325)
    example.check_model(EXTENSIONS, TARGET_IDS)


def test_a_stage_can_be_built_in_python() -> None:
    config = StageConfig(connector=ConnectorConfig(codec_chunk_frames=4), vocoder_cudagraph=VocoderGraphSettings(num_warmups=1))
    assert config == StageConfig.from_dict({"connector": {"codec_chunk_frames": 4}, "vocoder_cudagraph": {"num_warmups": 1}})


@pytest.mark.parametrize(
    ("stage", "off"),
    [
        ({}, False),
        ({"cudagraph_mode": "PIECEWISE"}, False),
        ({"cudagraph_mode": "NONE"}, True),
        ({"enforce_eager": True}, True),
        ({"vocoder_cudagraph": {"enforce_eager": True}}, True),
    ],
)
def test_what_switches_graphs_off(stage: dict[str, Any], off: bool) -> None:
    config = StageConfig.from_dict(stage)
    assert config.graph_settings.enforce_eager is off
    assert config.graph_settings.model_copy(update={"enforce_eager": False}) == config.vocoder_cudagraph.model_copy(
        update={"enforce_eager": False}
    )


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({"max_num_seq": 8}, r"^max_num_seq: unknown key\. Did you mean 'max_num_seqs'\? Accepted: async_chunk, connector, "),
        ({"codec_chunk_frames": 8}, r"^codec_chunk_frames: unknown key\. It belongs under 'connector'\."),
        ({"max_memory_bytes": 8}, r"^max_memory_bytes: unknown key\. It belongs under 'vocoder_cudagraph'\."),
        ({"capture_batch_sizes": [1]}, r"^capture_batch_sizes: unknown key\. It belongs under 'vocoder_cudagraph'\."),
        ({"connector": {"codec_chunk_frame": 8}}, r"^connector\.codec_chunk_frame: unknown key\. Did you mean 'codec_chunk_frames'\?"),
        ({"connector": {"log_stats": True}}, r"^connector\.log_stats: unknown key\. It belongs under 'vocoder_cudagraph'\."),
        (
            {"connector": {"decode_cudagraph_capture_sizes": [5]}},
            r"It belongs under 'vocoder_cudagraph\.targets\.qwen3_tts\.stateless\.capture_bucket_sizes'\.",
        ),
        ({"cudagraph_mode": "full"}, r"^cudagraph_mode: Input should be 'NONE', .* \(got 'full'\)\. Did you mean 'FULL'\?$"),
        ({"cudagraph_mode": "PIECEWIS"}, r"Did you mean 'PIECEWISE'\?$"),
        ({"cudagraph_mode": None}, r"^cudagraph_mode: Input should be 'NONE', .* \(got None\)$"),
        ({"max_num_seqs": 0}, r"^max_num_seqs: Input should be greater than 0 \(got 0\)$"),
        ({"async_chunk": "yes"}, r"^async_chunk: Input should be a valid boolean \(got 'yes'\)$"),
        ({"enforce_eager": 1, "max_num_seqs": "2"}, r"^enforce_eager: .*; max_num_seqs: "),
        ({"vocoder_cudagraph": {"eviction": "generations"}}, r"^vocoder_cudagraph\.eviction: .*Did you mean 'generation'\?$"),
        ({"vocoder_cudagraph": {"num_warmups": 0}}, r"^vocoder_cudagraph\.num_warmups: Input should be greater than 0"),
        (
            {"vocoder_cudagraph": {"targets": {"qwen3_tts.suffix": {"max_extra_graph": 4}}}},
            r"^vocoder_cudagraph\.targets\.qwen3_tts\.suffix\.max_extra_graph: unknown key\. Did you mean 'max_extra_graphs'\? Accepted: ",
        ),
        ([1], r"^the configuration: must hold keys and values, got \[1\]"),
        ({1: 2}, r"^the configuration: keys must be strings, got 1"),
    ],
)
def test_bad_stages_are_refused(stage: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StageConfig.from_dict(stage)


def test_the_framework_s_own_reader_names_paths_too() -> None:
    with pytest.raises(
        ConfigError, match=r"^vocoder_cudagraph\.targets\.a\.b\.enable: unknown key\. Did you mean 'enabled'\? Accepted: en"
    ):
        VocoderGraphSettings.from_dict({"targets": {"a.b": {"enable": True}}})
    with pytest.raises(ConfigError, match=r"^vocoder_cudagraph\.num_warmup: unknown key\. Did you mean 'num_warmups'\?"):
        VocoderGraphSettings.from_dict({"num_warmup": 1})
    with pytest.raises(ConfigError, match=r"^vocoder_cudagraph: must hold keys and values, got 3"):
        VocoderGraphSettings.from_dict(3)  # type: ignore[arg-type]


def test_copies_keep_the_model_s_keys(example: StageConfig) -> None:
    for other in (example.model_copy(), example.model_copy(deep=True), copy.deepcopy(example), pickle.loads(pickle.dumps(example))):
        assert other == example
        assert other.extension(Qwen3TTSGraphKeys) == example.extension(Qwen3TTSGraphKeys)
    changed = example.model_copy(update={"max_num_seqs": 2})
    assert changed.target_extension("qwen3_tts.stateless", StatelessTargetKeys).capture_bucket_sizes == (150, 325)


def test_the_model_s_keys_count_for_equality(example: StageConfig) -> None:
    content = example.to_dict()
    content["vocoder_cudagraph"]["capture_batch_sizes"] = [1, 2]
    other = StageConfig.from_dict(content)
    assert other != example
    assert other.vocoder_cudagraph == example.vocoder_cudagraph


def test_reading_changes_nothing_of_what_was_given() -> None:
    given_ = {
        "vocoder_cudagraph": {"components": {"qwen3_tts.stateless": {"capture_bucket_sizes": [9]}}, "decode_cudagraph_batch_sizes": "1,2"}
    }
    before = copy.deepcopy(given_)
    with pytest.warns(UserWarning, match="decode_cudagraph_batch_sizes is the former place of"):
        config = StageConfig.from_dict(given_)
    assert given_ == before
    assert config.extension(Qwen3TTSGraphKeys).capture_batch_sizes == (1, 2)


counts = st.integers(1, 400)
connectors = st.fixed_dictionaries(
    {},
    optional={
        "codec_chunk_frames": st.integers(40, 400),
        "initial_codec_chunk_frames": st.none() | st.integers(0, 25),
        "codec_left_context_frames": st.integers(0, 200),
        "codec_chunk_ramp": st.none() | st.lists(counts, max_size=4),
    },
)
overrides = st.fixed_dictionaries(
    {},
    optional={"enabled": st.booleans(), "enable_lazy_capture": st.booleans(), "max_extra_graphs": st.none() | st.integers(0, 9)},
)
sections = st.fixed_dictionaries(
    {},
    optional={
        "enforce_eager": st.booleans(),
        "max_memory_bytes": st.none() | st.integers(0, 2**40),
        "num_warmups": counts,
        "eviction": st.sampled_from(["none", "generation"]),
        "capture_batch_sizes": st.lists(counts, min_size=1, max_size=4, unique=True),
        "decode_chunk_frames": counts,
        "targets": st.dictionaries(st.sampled_from([*TARGET_IDS, "other.target"]), st.none() | overrides),
    },
)
stages = st.fixed_dictionaries(
    {},
    optional={
        "async_chunk": st.booleans(),
        "connector": st.none() | connectors,
        "cudagraph_mode": st.sampled_from(["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]),
        "enforce_eager": st.booleans(),
        "max_num_seqs": counts,
        "vocoder_cudagraph": st.none() | sections,
    },
)


@given(stage=stages)
def test_a_stage_round_trips_through_its_dict_and_yaml(stage: dict[str, Any]) -> None:
    config = StageConfig.from_dict(stage)
    assert StageConfig.from_dict(config.to_dict()) == config
    assert StageConfig.from_dict(yaml.safe_load(yaml.safe_dump(config.to_dict()))) == config
    section = stage.get("vocoder_cudagraph") or {}
    assert config.extension(Qwen3TTSGraphKeys).capture_batch_sizes == tuple(section.get("capture_batch_sizes", (1, 2, 4)))


PLACES: list[tuple[tuple[str, ...], list[str]]] = [
    ((), list(StageConfig.model_fields)),
    (("connector",), list(ConnectorConfig.model_fields)),
    (("vocoder_cudagraph",), [*VocoderGraphSettings.model_fields, *Qwen3TTSGraphKeys.model_fields]),
    (("vocoder_cudagraph", "targets", "qwen3_tts.stateless"), [*TargetSettings.model_fields, *StatelessTargetKeys.model_fields]),
]


@given(data=st.data())
def test_every_slip_of_one_letter_is_refused_with_the_key_that_was_meant(data: st.DataObject) -> None:
    place, keys = data.draw(st.sampled_from(PLACES))
    key = data.draw(st.sampled_from(keys))
    at = data.draw(st.integers(0, len(key) - 1))
    slip = key[:at] + key[at + 1 :]
    content: dict[str, Any] = {slip: 1}
    for section in reversed(place):
        content = {section: content}
    with pytest.raises(ConfigError) as raised:
        StageConfig.from_dict(content)
    assert str(raised.value).startswith(f"{'.'.join([*place, slip])}: unknown key. Did you mean '{key}'? Accepted: ")


def test_the_keys_of_the_model_are_printed_too() -> None:
    shown = repr(StageConfig.from_dict({"vocoder_cudagraph": {"capture_batch_sizes": [1, 9]}}))
    assert "extensions={'capture_batch_sizes': [1, 9]}" in shown
    assert "extensions" not in repr(StageConfig())


def test_bytes_are_asked_for_as_such() -> None:
    with pytest.raises(ConfigError, match=r"max_memory_bytes: must be a whole number of bytes, e.g. 4294967296 for 4 GiB \(got '4GiB'\)"):
        StageConfig.from_dict({"vocoder_cudagraph": {"max_memory_bytes": "4GiB"}})
