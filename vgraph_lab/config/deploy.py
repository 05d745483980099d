"""Deploy files of vllm-omni: the code2wav stage and the connector that feeds it.

The layout is the one that vllm-omni documents (docs/configuration/stage_configs.md there): named ``connectors`` with an
``extra`` block each, ``stages`` that name the connectors they read from and write to, ``platforms`` with overrides for
other accelerators, and ``base_config`` for a file to build on::

    async_chunk: true
    connectors:
      shm: {name: SharedMemoryConnector, extra: {codec_chunk_frames: 25, codec_left_context_frames: 72}}
    stages:
      - {stage_id: 0, output_connectors: {to_stage_1: shm}}
      - {stage_id: 1, max_num_seqs: 64, input_connectors: {from_stage_0: shm}}

A deploy file configures a whole engine, so a key that is not ours is another component's and is passed over. Three kinds of
keys are warned about, since they look meant for the decoder and have no effect here: near misses of our own keys, other
``codec_chunk_…`` keys, and other ``decode_…`` keys that are switched on.
"""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from vgraph_lab.errors import ConfigError, did_you_mean

from .connector import ConnectorConfig
from .extensions import move_legacy_keys, with_targets_key
from .sections import StageSections
from .validation import as_mapping
from .yaml_file import read_yaml

__all__ = ["deploy_sections", "is_deploy", "read_deploy_file"]

_PLAIN_KEYS = ("async_chunk", "enforce_eager", "max_num_seqs")
_STAGE_KEYS = (*_PLAIN_KEYS, "compilation_config", "vocoder_cudagraph")
_ENGINE_BLOCKS = ("engine_args", "engine_extras")  # a stage's keys may stand in these too
_NEAR = 0.85  # of two names, by difflib's ratio: a slip of one or two letters


def is_deploy(data: Mapping[str, Any]) -> bool:
    """Whether a configuration has the layout of a deploy file, the present or the former one."""
    return not data.keys().isdisjoint({"stages", "connectors", "base_config", "stage_args"})


def read_deploy_file(path: Path) -> dict[str, Any]:
    """A file on top of those that ``base_config`` names, by vllm-omni's rules; a file without that key as it is.

    Connectors are merged key by key, stages by their ``stage_id``, and of all other keys the later file's value counts.

    Raises:
        ConfigError: a file cannot be read, or a chain of files comes back to its beginning.
    """
    return _with_bases(path, ())


_OURS_ALONE = frozenset({"vocoder_cudagraph", *ConnectorConfig.model_fields})


def _with_bases(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    content = read_yaml(path)
    if path.resolve() in above:
        raise ConfigError(f"{path}: base_config leads back to this file.")
    base = content.pop("base_config", None)
    if base is None:
        return content
    if not isinstance(base, str):
        raise ConfigError(f"{path}: base_config must be the path of a file, got {base!r}.")
    merged = _with_bases(path.parent / base, (*above, path.resolve()))
    for stage in (*_stages(merged), *_stages(content)):
        if not isinstance(stage.get("stage_id"), int | str | None):
            raise ConfigError(f"{path}: stage_id must be a number, got {stage['stage_id']!r}.")
    stages = {stage.get("stage_id"): stage for stage in _stages(merged)}
    for stage in _stages(content):
        before = stages.get(stage.get("stage_id"), {})
        blocks = {key: _merged(before[key], stage[key]) for key in _ENGINE_BLOCKS if key in before and key in stage}
        stages[stage.get("stage_id")] = {**before, **stage, **blocks}
    connectors = _merged(as_mapping(merged.get("connectors"), "connectors"), as_mapping(content.get("connectors"), "connectors"))
    return {**merged, **content, "connectors": connectors, "stages": list(stages.values())}


def _merged(before: Any, after: Any) -> Any:
    if not (isinstance(before, Mapping) and isinstance(after, Mapping)):
        return after
    return {**before, **{key: _merged(before[key], value) if key in before else value for key, value in after.items()}}


def deploy_sections(data: Mapping[str, Any]) -> StageSections:
    """The sections of a deploy file that concern the decoder.

    Raises:
        ConfigError: no stage or several could be the code2wav stage or feed it, or a key of the decoder is wrong.
    """
    if "stage_args" in data:
        raise ConfigError("stage_args: this is vllm-omni's former layout. Give the deploy file of the model (vllm_omni/deploy there).")
    if "base_config" in data:
        raise ConfigError("base_config: a mapping has no folder to look in. Read the file itself, with StageConfig.from_yaml.")
    index, stage = _code2wav(_stages(data))
    stage_path = f"stages[{index}]"
    values, paths = _stage_values(stage, stage_path)
    if "async_chunk" not in values and data.get("async_chunk") is not None:
        values["async_chunk"] = data["async_chunk"]
        paths["async_chunk"] = "async_chunk"

    graphs_path = paths.pop("vocoder_cudagraph", f"{stage_path}.vocoder_cudagraph")
    graphs, targets_path = with_targets_key(values.pop("vocoder_cudagraph", None), graphs_path)
    compilation_path = paths.pop("compilation_config", "")
    compilation = as_mapping(values.pop("compilation_config", None), compilation_path)
    mode = compilation.get("cudagraph_mode")
    if mode is not None:
        values["cudagraph_mode"] = mode.upper() if isinstance(mode, str) else mode  # vLLM takes both cases
        paths["cudagraph_mode"] = f"{compilation_path}.cudagraph_mode"

    extra, extra_path = _feeding_extra(data, stage, stage_path)
    move_legacy_keys(extra, extra_path, graphs, graphs_path)
    if targets_path.endswith(".components") and "targets" in graphs:
        graphs["components"] = graphs.pop("targets")  # errors name what the file says
    return StageSections(values, _delivery(extra, extra_path), graphs, extra_path, graphs_path, paths)


def _stages(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    stages = data.get("stages")
    if stages is None:
        return []
    if not isinstance(stages, list):
        raise ConfigError(f"stages: must be a list of stages, got {stages!r}.")
    return [as_mapping(stage, f"stages[{index}]") for index, stage in enumerate(stages)]


def _code2wav(stages: list[dict[str, Any]]) -> tuple[int, dict[str, Any]]:
    """The stage that is named so, or else has a vocoder_cudagraph section, or else is fed and feeds none."""
    if not stages:
        raise ConfigError(
            "stages: the file lists none, so none decodes. A deploy file lists its stages; in a stage's own file, chunk delivery "
            "stands under 'connector'."
        )
    rules: tuple[Callable[[list[dict[str, Any]]], bool], ...] = (
        lambda blocks: any(block.get("model_stage") == "code2wav" for block in blocks),
        lambda blocks: any("vocoder_cudagraph" in block for block in blocks),
        lambda blocks: bool(blocks[0].get("input_connectors")) and not blocks[0].get("output_connectors"),
    )
    for rule in rules:
        found = [(i, stage) for i, stage in enumerate(stages) if rule(list(_blocks(stage, f"stages[{i}]").values()))]
        if len(found) == 1:
            return found[0]
        if found:
            break
    listed = "; ".join(
        f"stage {stage.get('stage_id', '?')} (stages[{index}]) reads from {_names(stage.get('input_connectors'))}, "
        f"writes to {_names(stage.get('output_connectors'))}"
        for index, stage in enumerate(stages)
    )
    problem = "several stages could decode" if found else "no stage reads from a connector and writes to none, as code2wav does"
    raise ConfigError(f"stages: {problem}. Give the one that decodes a vocoder_cudagraph section. Listed: {listed}.")


def _blocks(stage: dict[str, Any], path: str) -> dict[str, dict[str, Any]]:
    """The mappings that hold a stage's keys, by path: itself first, then its engine blocks."""
    return {path: stage, **{f"{path}.{name}": as_mapping(stage.get(name), f"{path}.{name}") for name in _ENGINE_BLOCKS}}


def _names(connectors: object) -> str:
    names = list(connectors.values()) if isinstance(connectors, Mapping) else []
    return ", ".join(repr(name) if isinstance(name, str) else "an unnamed connector" for name in names) or "none"


def _stage_values(stage: dict[str, Any], path: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Our keys of a stage, and where each was read. A key without a value is absent, as in vllm-omni."""
    values: dict[str, Any] = {}
    paths: dict[str, str] = {}
    for here, block in _blocks(stage, path).items():
        for key, value in block.items():
            if key not in _STAGE_KEYS:
                _judge_near_miss(here, key, _STAGE_KEYS)
            elif value is not None and key in values:
                raise ConfigError(f"{here}.{key}: is given as {paths[key]} too. Keep one of them.")
            elif value is not None:
                values[key], paths[key] = value, f"{here}.{key}"
    return values, paths


def _feeding_extra(data: Mapping[str, Any], stage: Mapping[str, Any], stage_path: str) -> tuple[dict[str, Any], str]:
    """The ``extra`` block of the connector that feeds the stage, and its path."""
    connectors = as_mapping(data.get("connectors"), "connectors")
    inputs = as_mapping(stage.get("input_connectors"), f"{stage_path}.input_connectors")
    used = list(dict.fromkeys(inputs.values())) if all(isinstance(n, str) for n in inputs.values()) else None
    if used is None:
        raise ConfigError(f"{stage_path}.input_connectors: must name connectors, got {inputs!r}.")
    if not used and len(connectors) == 1:
        used = list(connectors)
    if len(used) > 1 or (not used and connectors):
        raise ConfigError(
            f"{stage_path}.input_connectors: which connector feeds this stage is not clear. Name one. "
            f"Named: {', '.join(used) or 'none'}; declared: {', '.join(sorted(connectors))}"
        )
    if not used:
        return {}, "connectors"  # vllm-omni makes a connector with its defaults
    (name,) = used
    if name not in connectors:
        hint = did_you_mean(name, connectors)
        declared = ", ".join(sorted(connectors)) or "none"
        raise ConfigError(f"{stage_path}.input_connectors: no connector is called {name!r}.{hint} Declared: {declared}")
    connector = as_mapping(connectors[name], f"connectors.{name}")
    return as_mapping(connector.get("extra"), f"connectors.{name}.extra"), f"connectors.{name}.extra"


def _delivery(extra: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Chunk-delivery keys of an ``extra`` block; without an initial size the first chunk depends on the load."""
    accepted = ConnectorConfig.model_fields
    delivery: dict[str, Any] = {"initial_codec_chunk_frames": None}
    for key, value in extra.items():
        if key in accepted:
            if value is not None:
                delivery[key] = value
            continue
        _judge_near_miss(path, key, accepted)
        if key.startswith("codec_chunk_") or (key.startswith("decode_") and value):
            warnings.warn(f"{path}.{key}: has no effect here.{did_you_mean(key, accepted)}", stacklevel=2)
    ramp = delivery.get("codec_chunk_ramp")
    if isinstance(ramp, str):  # vllm-omni also takes "4,8,16"
        words = [word.strip() for word in ramp.split(",")]
        if not all(re.fullmatch(r"-?[0-9]{1,9}", word) for word in words):
            raise ConfigError(f"{path}.codec_chunk_ramp: must be numbers of frames, e.g. [4, 8, 16] or '4,8,16' (got {ramp!r})")
        ramp = delivery["codec_chunk_ramp"] = [int(word) for word in words]
    if isinstance(ramp, list) and len(ramp) == 1:
        warnings.warn(f"{path}.codec_chunk_ramp: {ramp} is switched off: vllm-omni asks for two entries or more.", stacklevel=2)
        del delivery["codec_chunk_ramp"]
    return delivery


def _judge_near_miss(path: str, key: str, accepted: Iterable[str]) -> None:
    """A key that nobody else could mean is an error; of other components' keys, a near miss of ours is worth a warning."""
    near = difflib.get_close_matches(key, list(accepted), n=1, cutoff=_NEAR)
    if near and near[0] in _OURS_ALONE:
        raise ConfigError(f"{path}.{key}: unknown key. Did you mean {near[0]!r}?")
    if near:
        warnings.warn(f"{path}.{key}: has no effect here. Did you mean {near[0]!r}?", stacklevel=2)
