"""Keys of models: who may declare them, when they are checked, and what a model that lacks them says."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, PositiveInt, ValidationError

from vgraph_lab.config import DistinctSizes, LegacyKey, ModelExtensions, Settings, StageConfig, declare_extensions, extensions
from vgraph_lab.errors import ConfigError
from vgraph_lab.qwen3_tts.settings import EXTENSIONS, TARGET_IDS, Qwen3TTSGraphKeys, StatelessTargetKeys


class ToyKeys(Settings):
    capture_batch_sizes: DistinctSizes = (1,)
    rounds: PositiveInt = 3


class ToyTargetKeys(Settings):
    depth: PositiveInt = 2


class NoKeys(Settings):
    pass


TOY = ModelExtensions("toy", ToyKeys, {"toy.head": ToyTargetKeys, "toy.tail": NoKeys}, {"old_rounds": LegacyKey(("rounds",))})


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Declarations of a test are forgotten after it."""
    monkeypatch.setattr(extensions, "_DECLARED", dict(extensions._DECLARED))


@pytest.fixture
def toy(registry: None) -> ModelExtensions:
    declare_extensions(TOY)
    return TOY


def graphs(**section: Any) -> StageConfig:
    return StageConfig.from_dict({"vocoder_cudagraph": section})


def test_declared_keys_are_read_beside_the_framework_s(toy: ModelExtensions) -> None:
    config = graphs(num_warmups=1, rounds=5, targets={"toy.head": {"depth": 4, "enabled": False}})
    assert config.vocoder_cudagraph.num_warmups == 1
    assert config.vocoder_cudagraph.targets["toy.head"].enabled is False
    assert config.extension(ToyKeys) == ToyKeys(rounds=5)
    assert config.target_extension("toy.head", ToyTargetKeys) == ToyTargetKeys(depth=4)
    config.check_model(toy, toy.targets)


def test_absent_keys_have_the_model_s_defaults(toy: ModelExtensions) -> None:
    for config in (StageConfig(), StageConfig.from_dict({}), graphs(targets={"toy.head": None})):
        assert config.extension(ToyKeys) == ToyKeys()
        assert config.target_extension("toy.head", ToyTargetKeys) == ToyTargetKeys()


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"round": 1}, r"^vocoder_cudagraph\.round: unknown key\. Did you mean 'rounds'\? Accepted: capture_batch_sizes, "),
        ({"rounds": 0}, r"^vocoder_cudagraph\.rounds: Input should be greater than 0 \(got 0\)$"),
        ({"rounds": "3"}, r"^vocoder_cudagraph\.rounds: Input should be a valid integer \(got '3'\)$"),
        ({"depth": 3}, r"^vocoder_cudagraph\.depth: unknown key\. It belongs under 'vocoder_cudagraph\.targets\.<id>'\."),
        (
            {"targets": {"toy.head": {"dept": 3}}},
            r"targets\.toy\.head\.dept: unknown key\. Did you mean 'depth'\? Accepted: depth, enable_lazy_capture, ",
        ),
        ({"targets": {"toy.head": {"depth": 0}}}, r"targets\.toy\.head\.depth: Input should be greater than 0"),
        ({"targets": {"toy.tail": {"depth": 3}}}, r"targets\.toy\.tail\.depth: unknown key\.(?! It)"),
        ({"targets": {"toy.head": {"rounds": 3}}}, r"targets\.toy\.head\.rounds: unknown key\. It belongs under 'vocoder_cudagraph'\."),
        ({"targets": {"toy.hed": {}}}, r"targets\.toy\.hed: no such Target\. Did you mean 'toy\.head'\? Declared: toy\.head, toy\.tail"),
        ({"components": {"toy.head": {"depth": "x"}}}, r"^vocoder_cudagraph\.components\.toy\.head\.depth: Input should be"),
        ({"components": {"toy.head": {"enabled": 1}}}, r"^vocoder_cudagraph\.components\.toy\.head\.enabled: Input should be"),
        ({"targets": {}, "components": {}}, r"'targets' and 'components' are two names of one key"),
        ({"targets": [1]}, r"^vocoder_cudagraph\.targets: must hold keys and values, got \[1\]"),
        ({"targets": {"toy.head": 1}}, r"^vocoder_cudagraph\.targets\.toy\.head: must hold keys and values, got 1"),
        ({"targets": {3: {}}}, r"^vocoder_cudagraph\.targets: keys must be strings, got 3"),
        ({"targets": {"other.one": {"depth": 1}}}, r"targets\.other\.one\.depth: unknown key\. Accepted: enable_lazy_capture"),
    ],
)
def test_what_nobody_accepts_fails_at_once(toy: ModelExtensions, section: dict[Any, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        graphs(**section)


@pytest.mark.parametrize("key", ["codec_chunk_frames", "initial_codec_chunk_frames", "codec_left_context_frames", "codec_chunk_ramp"])
def test_chunk_delivery_belongs_under_the_connector(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^vocoder_cudagraph\.{key}: unknown key\. It belongs under 'connector'\."):
        graphs(**{key: 1})
    with pytest.raises(ConfigError, match=rf"suffix\.{key}: unknown key\. It belongs under 'connector'\."):
        graphs(targets={"qwen3_tts.suffix": {key: 1}})


def test_targets_of_undeclared_families_are_left_to_the_model_check() -> None:
    config = graphs(targets={"another.target": {"enabled": False}})
    with pytest.raises(ConfigError, match=r"targets\.another\.target: no such Target\. Declared: qwen3_tts\.icl_prefix"):
        config.check_model(EXTENSIONS, TARGET_IDS)
    config.check_model(None, ["another.target"])


def test_a_key_of_another_model_is_refused_when_the_model_is_known(toy: ModelExtensions) -> None:
    with pytest.raises(
        ConfigError, match=r"^vocoder_cudagraph\.rounds: unknown key\..*Accepted: capture_batch_sizes, .*decode_chunk_frames"
    ):
        graphs(rounds=1).check_model(EXTENSIONS, TARGET_IDS)
    with pytest.raises(ConfigError, match=r"^vocoder_cudagraph\.rounds: unknown key\."):
        graphs(rounds=1).check_model(None, [])
    with pytest.raises(ConfigError, match=r"targets\.toy\.head\.depth: unknown key\."):
        graphs(targets={"toy.head": {"depth": 1}}).check_model(EXTENSIONS, [*TARGET_IDS, "toy.head"])
    graphs(capture_batch_sizes=[2]).check_model(toy, [])


def test_two_families_may_give_one_key_two_meanings(toy: ModelExtensions) -> None:
    """It is enough that one accepts the value; the model that runs decides."""
    config = graphs(capture_batch_sizes=[])
    assert config.extension(ToyKeys).capture_batch_sizes == ()
    with pytest.raises(ConfigError, match=r"^vocoder_cudagraph\.capture_batch_sizes: .*at least 1 item"):
        config.extension(Qwen3TTSGraphKeys)
    with pytest.raises(ConfigError, match=r"^vocoder_cudagraph\.capture_batch_sizes\.0: "):
        graphs(capture_batch_sizes=["1"])


def test_old_names_are_read_with_a_warning(toy: ModelExtensions) -> None:
    with pytest.warns(
        UserWarning, match=r"^vocoder_cudagraph\.old_rounds is the former place of vocoder_cudagraph\.rounds and read as that"
    ):
        assert graphs(old_rounds=4).extension(ToyKeys).rounds == 4
    with pytest.raises(ConfigError, match=r"old_rounds is the former place of vocoder_cudagraph\.rounds, which is given too"):
        graphs(old_rounds=4, rounds=4)


def test_a_family_is_declared_once(toy: ModelExtensions) -> None:
    declare_extensions(ModelExtensions("toy", ToyKeys, dict(TOY.targets), dict(TOY.legacy)))
    with pytest.raises(ConfigError, match=r"'toy' are declared already, and differently"):
        declare_extensions(ModelExtensions("toy", NoKeys, {}))


class TakenStageKey(BaseModel):
    strict: int = 0


class TakenTargetKey(BaseModel):
    enabled: int = 0


class TakenChunkKey(BaseModel):
    codec_chunk_frames: int = 0


@pytest.mark.parametrize(
    ("declaration", "message"),
    [
        (ModelExtensions("new", TakenStageKey, {}), r"'new' declares strict, which the framework reads itself"),
        (ModelExtensions("new", TakenChunkKey, {}), r"'new' declares codec_chunk_frames"),
        (ModelExtensions("new", NoKeys, {"new.x": TakenTargetKey}), r"'new\.x' declares enabled"),
        (ModelExtensions("new", NoKeys, {"old.x": NoKeys}), r"Target ids of 'new' begin with 'new\.', got 'old\.x'"),
    ],
)
def test_declarations_that_contradict_the_framework_are_refused(registry: None, declaration: ModelExtensions, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        declare_extensions(declaration)
    assert "new" not in extensions._DECLARED


def test_the_keys_of_qwen3_tts() -> None:
    keys = Qwen3TTSGraphKeys()
    assert (keys.capture_batch_sizes, keys.batch_limit, keys.decode_chunk_frames, keys.decode_left_context_frames) == (
        (1, 2, 4),
        4,
        300,
        25,
    )
    assert StatelessTargetKeys().capture_bucket_sizes == ()
    assert set(EXTENSIONS.targets) == set(TARGET_IDS)


@pytest.mark.parametrize(("limit", "sizes"), [(1, (1,)), (2, (1, 2)), (3, (1, 2)), (4, (1, 2, 4)), (9, (1, 2, 4))])
def test_default_batch_sizes_respect_the_limit(limit: int, sizes: tuple[int, ...]) -> None:
    keys = graphs(decode_batch_max_size=limit).extension(Qwen3TTSGraphKeys)
    assert (keys.capture_batch_sizes, keys.batch_limit) == (sizes, limit)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"capture_batch_sizes": [1, 8], "decode_batch_max_size": 4}, r"^vocoder_cudagraph: capture_batch_sizes \[8\] are above .*, 4"),
        ({"capture_batch_sizes": [1, 2, 1]}, r"capture_batch_sizes: repeats 1; name each size once"),
        ({"capture_batch_sizes": []}, r"capture_batch_sizes: .*at least 1 item"),
        ({"capture_batch_sizes": 4}, r"capture_batch_sizes: must be a list, e.g. \[1, 4\] \(got 4\)"),
        ({"capture_batch_sizes": [1, True]}, r"capture_batch_sizes\.1: Input should be a valid integer"),
        ({"decode_batch_max_size": 0}, r"decode_batch_max_size: Input should be greater than 0"),
        ({"targets": {"qwen3_tts.stateless": {"capture_bucket_sizes": [5, 5]}}}, r"stateless\.capture_bucket_sizes: repeats 5"),
        ({"targets": {"qwen3_tts.suffix": {"capture_bucket_sizes": [5]}}}, r"suffix\.capture_bucket_sizes: unknown key"),
    ],
)
def test_what_qwen3_tts_refuses(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        graphs(**section)


def test_keys_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Qwen3TTSGraphKeys().decode_chunk_frames = 1
