"""Deploy files of vllm-omni: what is read, what is passed over, and what is warned about."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

from vgraph_lab.config import StageConfig, TargetSettings
from vgraph_lab.errors import ConfigError
from vgraph_lab.qwen3_tts.settings import EXTENSIONS, TARGET_IDS, Qwen3TTSGraphKeys, StatelessTargetKeys

EXAMPLES = Path(__file__).parents[1] / "data" / "deploy"


def deploy(extra: dict[str, Any] | None = None, **stage: Any) -> dict[str, Any]:
    """A small deployment: a talker and a decoder."""
    return {
        "connectors": {"codes": {"name": "SharedMemoryConnector", "extra": extra or {}}},
        "stages": [
            {"stage_id": 0, "output_connectors": {"to_stage_1": "codes"}},
            {"stage_id": 1, "input_connectors": {"from_stage_0": "codes"}, **stage},
        ],
    }


def test_the_streaming_example() -> None:
    with pytest.warns(UserWarning, match="is the former place of") as told:
        config = StageConfig.from_yaml(EXAMPLES / "streaming.yaml")
    assert config.async_chunk is True
    assert config.connector.first_chunk_choices == (1,)
    assert (config.max_num_seqs, config.cudagraph_mode, config.enforce_eager) == (10, "FULL", False)
    keys = config.extension(Qwen3TTSGraphKeys)
    assert (keys.capture_batch_sizes, keys.decode_batch_max_size) == ((1, 2), 2)
    buckets = config.target_extension("qwen3_tts.stateless", StatelessTargetKeys).capture_bucket_sizes
    assert buckets == (25, 73, 97, 169, 325)
    config.check_model(EXTENSIONS, TARGET_IDS)
    graphs = "stages[1].vocoder_cudagraph"
    assert sorted(str(warning.message) for warning in told) == [
        f"connectors.codes.extra.{old} is the former place of {graphs}.{new} and read as that. Move it there."
        for old, new in (
            ("decode_batch_max_size", "decode_batch_max_size"),
            ("decode_cudagraph_batch_sizes", "capture_batch_sizes"),
            ("decode_cudagraph_capture_sizes", "targets.qwen3_tts.stateless.capture_bucket_sizes"),
        )
    ]


def test_the_example_with_its_policy_in_the_stage() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = StageConfig.from_yaml(EXAMPLES / "runner_owned.yaml")
    assert config.connector.initial_codec_chunk_frames is None
    assert config.connector.first_chunk_choices == (2, 4, 8, 16)
    assert config.vocoder_cudagraph.targets["qwen3_tts.suffix"] == TargetSettings(enable_lazy_capture=True, max_extra_graphs=4)
    assert config.extension(Qwen3TTSGraphKeys).batch_limit == 4
    assert config.target_extension("qwen3_tts.stateless", StatelessTargetKeys).capture_bucket_sizes == (150, 325)


def test_an_overlay_is_read_on_top_of_its_base() -> None:
    base = StageConfig.from_yaml(EXAMPLES / "runner_owned.yaml")
    config = StageConfig.from_yaml(EXAMPLES / "ramp_overlay.yaml")
    assert config.connector == base.connector.model_copy(update={"codec_chunk_ramp": (4, 4, 8, 16, 25)})
    assert config.graph_settings.enforce_eager is True
    assert config.model_copy(update={"connector": base.connector, "enforce_eager": False}) == base


def test_a_deploy_file_and_a_stage_file_say_the_same() -> None:
    section = {"num_warmups": 1, "capture_batch_sizes": [2], "targets": {"qwen3_tts.suffix": {"enabled": False}}}
    extra = {"codec_chunk_frames": 10, "initial_codec_chunk_frames": 2, "codec_left_context_frames": 7}
    deployed = StageConfig.from_dict({"async_chunk": False, **deploy(extra, max_num_seqs=3, vocoder_cudagraph=section)})
    assert deployed == StageConfig.from_dict({"async_chunk": False, "connector": extra, "max_num_seqs": 3, "vocoder_cudagraph": section})


@pytest.mark.parametrize("block", ["engine_args", "engine_extras"])
def test_keys_of_the_engine_blocks_count(block: str) -> None:
    config = StageConfig.from_dict(deploy(**{block: {"max_num_seqs": 7, "compilation_config": {"cudagraph_mode": "none"}}}))
    assert (config.max_num_seqs, config.cudagraph_mode) == (7, "NONE")
    with pytest.raises(ConfigError, match=rf"^stages\[1\]\.{block}\.max_num_seqs: is given as stages\[1\]\.max_num_seqs too"):
        StageConfig.from_dict(deploy(max_num_seqs=7, **{block: {"max_num_seqs": 7}}))


def test_a_stage_s_own_async_chunk_counts_before_the_file_s() -> None:
    assert StageConfig.from_dict({"async_chunk": True, **deploy(async_chunk=False)}).async_chunk is False
    assert StageConfig.from_dict({"async_chunk": False, **deploy()}).async_chunk is False
    assert StageConfig.from_dict(deploy()).async_chunk is True


def test_keys_without_a_value_are_absent() -> None:
    extra = {"codec_chunk_frames": None, "initial_codec_chunk_frames": None, "decode_cudagraph_batch_sizes": None, "codec_chunk_ramp": None}
    config = StageConfig.from_dict({"async_chunk": None, **deploy(extra, max_num_seqs=None, enforce_eager=None, compilation_config=None)})
    assert config == StageConfig.from_dict(deploy())


def test_a_lone_connector_needs_no_name() -> None:
    data = deploy({"codec_chunk_frames": 9}, vocoder_cudagraph={})
    del data["stages"][1]["input_connectors"]
    assert StageConfig.from_dict(data).connector.codec_chunk_frames == 9
    data["connectors"]["other"] = {}
    with pytest.raises(ConfigError, match=r"which connector feeds this stage is not clear.*Named: none; declared: codes, other"):
        StageConfig.from_dict(data)


def test_without_connectors_the_defaults_hold() -> None:
    config = StageConfig.from_dict({"stages": [{"stage_id": 0}, {"stage_id": 1, "vocoder_cudagraph": {}}]})
    assert config.connector.model_dump() == {
        "codec_chunk_frames": 25,
        "initial_codec_chunk_frames": None,
        "codec_left_context_frames": 72,
        "codec_chunk_ramp": None,
    }


@pytest.mark.parametrize(
    ("old", "value", "sizes"),
    [
        ("decode_cudagraph_batch_sizes", "1, 8", (1, 8)),
        ("decode_cudagraph_batch_sizes", 3, (3,)),
        ("decode_cudagraph_batch_sizes", [4, 1, 4], (4, 1)),
        ("decode_batch_max_size", 0, (1, 2, 4)),
        ("decode_batch_max_size", 2, (1, 2)),
    ],
)
def test_old_values_are_read_as_they_were_meant(old: str, value: object, sizes: tuple[int, ...]) -> None:
    with pytest.warns(UserWarning, match=f"{old} is the former place of"):
        assert StageConfig.from_dict(deploy({old: value})).extension(Qwen3TTSGraphKeys).capture_batch_sizes == sizes


@pytest.mark.parametrize("name", ["targets", "components"])
def test_old_buckets_join_the_overrides_of_their_target(name: str) -> None:
    section = {name: {"qwen3_tts.stateless": {"enabled": False}}}
    with pytest.warns(UserWarning, match="capture_sizes is the former place of"):
        config = StageConfig.from_dict(deploy({"decode_cudagraph_capture_sizes": "97,325"}, vocoder_cudagraph=section))
    assert config.vocoder_cudagraph.targets["qwen3_tts.stateless"].enabled is False
    assert config.target_extension("qwen3_tts.stateless", StatelessTargetKeys).capture_bucket_sizes == (97, 325)


@pytest.mark.parametrize(
    ("extra", "section", "message"),
    [
        (
            {"decode_cudagraph_batch_sizes": [1]},
            {"capture_batch_sizes": [1]},
            r"^connectors\.codes\.extra\.decode_cudagraph_batch_sizes is the former place of "
            r"stages\[1\]\.vocoder_cudagraph\.capture_batch_sizes, which is given too",
        ),
        (
            {"decode_cudagraph_capture_sizes": [1]},
            {"components": {"qwen3_tts.stateless": {"capture_bucket_sizes": [1]}}},
            r"decode_cudagraph_capture_sizes is the former place of .*capture_bucket_sizes, which is given too",
        ),
    ],
)
def test_an_old_key_beside_its_new_form_is_refused(extra: dict[str, Any], section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StageConfig.from_dict(deploy(extra, vocoder_cudagraph=section))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"codec_chunk_adaptive": True}, r"extra\.codec_chunk_adaptive: has no effect here"),
        ({"decode_enable_tf32": True}, r"extra\.decode_enable_tf32: has no effect here"),
        ({"decode_compile_shapes": ["1:325"]}, r"extra\.decode_compile_shapes: has no effect here"),
        ({"codec_chunk_ramp": [4]}, r"codec_chunk_ramp: \[4\] is switched off: vllm-omni asks for two"),
        ({"codec_chunk_ramp": [4, 0]}, r"connectors\.codes\.extra\.codec_chunk_ramp: \[4, 0\] is switched off"),
        ({"initial_codec_chunk_frames": 99}, r"connectors\.codes\.extra\.initial_codec_chunk_frames: 99 is more"),
    ],
)
def test_what_has_no_effect_is_warned_about(extra: dict[str, Any], message: str) -> None:
    with pytest.warns(UserWarning, match=message):
        config = StageConfig.from_dict(deploy(extra))
    assert config.connector.codec_chunk_frames == 25
    assert config.connector.ramp == ()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (deploy({"codec_chunk_frame": 10}), r"extra\.codec_chunk_frame: unknown key\. Did you mean 'codec_chunk_frames'\?"),
        (deploy({"inital_codec_chunk_frames": 1}), r"Did you mean 'initial_codec_chunk_frames'\?"),
        (deploy(vocoder_cudagraphs={}), r"stages\[1\]\.vocoder_cudagraphs: unknown key\. Did you mean 'vocoder_cudagraph'\?"),
    ],
)
def test_a_near_miss_of_a_key_that_is_ours_alone_is_an_error(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StageConfig.from_dict(data)


def test_a_near_miss_of_an_engine_key_is_warned_about() -> None:
    """It may be a key of another component."""
    with pytest.warns(UserWarning, match=r"stages\[1\]\.max_num_seq: has no effect here\. Did you mean 'max_num_seqs'\?"):
        assert StageConfig.from_dict(deploy(max_num_seq=3)).max_num_seqs == 64


def test_a_ramp_in_words() -> None:
    assert StageConfig.from_dict(deploy({"codec_chunk_ramp": "4, 4,8"})).connector.ramp == (4, 4, 8)
    with pytest.raises(ConfigError, match=r"^connectors\.codes\.extra\.codec_chunk_ramp: must be numbers of frames.*got '4,x'"):
        StageConfig.from_dict(deploy({"codec_chunk_ramp": "4,x"}))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"connectors": {}}, r"^stages: the file lists none.*'connector'"),
        ({"stages": []}, r"^stages: the file lists none"),
        ({"stages": {"a": 1}}, r"^stages: must be a list of stages"),
        ({"stages": [1]}, r"^stages\[0\]: must hold keys and values, got 1"),
        ({"stage_args": []}, r"^stage_args: this is vllm-omni's former layout"),
        ({"base_config": "a.yaml"}, r"^base_config: a mapping has no folder"),
        (
            {"stages": [{"stage_id": 0}]},
            r"no stage reads from a connector and writes to none.*Listed: stage 0 \(stages\[0\]\) reads from none",
        ),
        (
            {"stages": [{"stage_id": 7, "input_connectors": {"a": "x"}}, {"stage_id": 8, "input_connectors": {"a": "y"}}]},
            r"several stages could decode\. .*stage 7 \(stages\[0\]\) reads from 'x', writes to none; stage 8 .* reads from 'y'",
        ),
        (
            deploy() | {"connectors": {"code": {}}},
            r"^stages\[1\]\.input_connectors: no connector is called 'codes'\. Did you mean 'code'\?",
        ),
        (deploy() | {"connectors": None}, r"no connector is called 'codes'\. Declared: none"),
        (deploy(input_connectors={"a": "codes", "b": "other"}), r"which connector feeds this stage is not clear.*Named: codes, other"),
        (deploy(input_connectors={"a": {"x": 1}}), r"^stages\[1\]\.input_connectors: must name connectors"),
        (
            deploy({"codec_chunk_frames": "25"}),
            r"^connectors\.codes\.extra\.codec_chunk_frames: Input should be a valid integer \(got '25'\)",
        ),
        (deploy(max_num_seqs="64"), r"^stages\[1\]\.max_num_seqs: Input should be a valid integer \(got '64'\)"),
        ({"async_chunk": 3, **deploy()}, r"^async_chunk: Input should be a valid boolean"),
        (
            deploy(compilation_config={"cudagraph_mode": "FUL"}),
            r"^stages\[1\]\.compilation_config\.cudagraph_mode: .*Did you mean 'FULL'\?",
        ),
        (deploy(engine_args=3), r"^stages\[1\]\.engine_args: must hold keys and values, got 3"),
        (deploy(compilation_config=3), r"^stages\[1\]\.compilation_config: must hold keys and values, got 3"),
        (
            deploy(vocoder_cudagraph={"codec_chunk_frames": 3}),
            r"^stages\[1\]\.vocoder_cudagraph\.codec_chunk_frames: unknown key\. It belongs under 'connectors\.codes\.extra'\.",
        ),
        (
            deploy(vocoder_cudagraph={"num_warmup": 3}),
            r"^stages\[1\]\.vocoder_cudagraph\.num_warmup: unknown key\. Did you mean 'num_warmups'",
        ),
        (
            deploy(vocoder_cudagraph={"components": {"qwen3_tts.sufix": {}}}),
            r"^stages\[1\]\.vocoder_cudagraph\.components\.qwen3_tts\.sufix: no such Target",
        ),
    ],
)
def test_bad_deployments_are_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StageConfig.from_dict(data)


def test_the_decoder_of_a_longer_chain() -> None:
    chain = deploy()
    chain["stages"].insert(0, {"stage_id": 9, "output_connectors": {"a": "hidden"}})
    chain["stages"][1]["input_connectors"] = {"a": "hidden"}
    chain["stages"][2]["max_num_seqs"] = 5
    chain["connectors"]["hidden"] = {"extra": {"codec_chunk_frames": 3}}
    config = StageConfig.from_dict(chain)
    assert (config.max_num_seqs, config.connector.codec_chunk_frames) == (5, 25)
    named = copy.deepcopy(chain)
    named["stages"][1] |= {"model_stage": "code2wav", "max_num_seqs": 6}
    assert StageConfig.from_dict(named).connector.codec_chunk_frames == 3


def test_a_base_chain_that_comes_back_is_refused(tmp_path: Path) -> None:
    for name, base in (("a", "b"), ("b", "a")):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"base_config": f"{base}.yaml"}))
    with pytest.raises(ConfigError, match=r"base_config leads back to this file"):
        StageConfig.from_yaml(tmp_path / "a.yaml")


def test_a_base_that_is_missing_or_no_path_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("base_config: absent.yaml")
    with pytest.raises(ConfigError, match=r"absent\.yaml: no such file"):
        StageConfig.from_yaml(path)
    path.write_text("base_config: [absent.yaml]")
    with pytest.raises(ConfigError, match=r"base_config must be the path of a file, got \['absent\.yaml'\]"):
        StageConfig.from_yaml(path)


def test_an_overlay_merges_engine_blocks_and_adds_stages(tmp_path: Path) -> None:
    base = deploy(engine_args={"max_num_seqs": 3, "seed": 1})
    del base["stages"][0]
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    overlay: dict[str, Any] = {
        "base_config": "base.yaml",
        "stages": [{"stage_id": 0}, {"stage_id": 1, "engine_args": {"enforce_eager": True}}],
    }
    (tmp_path / "overlay.yaml").write_text(yaml.safe_dump(overlay))
    config = StageConfig.from_yaml(tmp_path / "overlay.yaml")
    assert (config.max_num_seqs, config.enforce_eager) == (3, True)
    overlay["connectors"] = {"codes": {"extra": {"codec_chunk_frames": 9}}}
    overlay["stages"][1]["engine_args"] = None
    (tmp_path / "overlay.yaml").write_text(yaml.safe_dump(overlay))
    config = StageConfig.from_yaml(tmp_path / "overlay.yaml")
    assert (config.max_num_seqs, config.connector.codec_chunk_frames) == (64, 9)


def test_the_later_file_counts(tmp_path: Path) -> None:
    base = deploy({"codec_chunk_frames": 9, "codec_left_context_frames": 5}, max_num_seqs=3, enforce_eager=True) | {"async_chunk": True}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    overlay = {
        "base_config": "base.yaml",
        "async_chunk": False,
        "connectors": {"codes": {"extra": {"codec_chunk_frames": 8}}},
        "stages": [{"stage_id": 1, "max_num_seqs": 4}],
    }
    (tmp_path / "overlay.yaml").write_text(yaml.safe_dump(overlay))
    config = StageConfig.from_yaml(tmp_path / "overlay.yaml")
    assert (config.async_chunk, config.max_num_seqs, config.enforce_eager) == (False, 4, True)
    assert (config.connector.codec_chunk_frames, config.connector.codec_left_context_frames) == (8, 5)


@pytest.mark.parametrize("ramp", ["--4,8", "4,-", "4,8_0", "4,٣"])
def test_a_ramp_in_words_that_are_no_numbers(ramp: str) -> None:
    with pytest.raises(ConfigError, match="must be numbers of frames"):
        StageConfig.from_dict(deploy({"codec_chunk_ramp": ramp}))


def test_stages_and_bases_that_cannot_be_told_apart_or_found(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(deploy()))
    (tmp_path / "overlay.yaml").write_text(yaml.safe_dump({"base_config": "base.yaml", "stages": [{"stage_id": [1]}]}))
    with pytest.raises(ConfigError, match=r"stage_id must be a number, got \[1\]"):
        StageConfig.from_yaml(tmp_path / "overlay.yaml")
    (tmp_path / "overlay.yaml").write_text('base_config: "a\\0b"\n')
    with pytest.raises(ConfigError, match="cannot be read"):
        StageConfig.from_yaml(tmp_path / "overlay.yaml")
