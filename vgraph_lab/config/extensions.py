"""Keys of ``vocoder_cudagraph`` that belong to models and their Targets.

The framework knows no model: a model declares the keys it accepts, as pydantic classes, and owns their meaning. Reading a
configuration separates those keys from the framework's own and checks each with the class that declares it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel

from vgraph_lab.errors import ConfigError, did_you_mean

from .connector import ConnectorConfig
from .settings import TargetSettings, VocoderGraphSettings
from .validation import as_mapping, joined, unknown_key, validated

__all__ = [
    "ExtensionValues",
    "LegacyKey",
    "ModelExtensions",
    "declare_extensions",
    "declared_extensions",
    "graph_key_homes",
    "move_legacy_keys",
    "read_graph_section",
    "with_targets_key",
]

E = TypeVar("E", bound=BaseModel)

FRAMEWORK_KEYS = frozenset(VocoderGraphSettings.model_fields)
TARGET_KEYS = frozenset(TargetSettings.model_fields)
CHUNK_KEYS = frozenset(ConnectorConfig.model_fields)


def _unchanged(value: object) -> object:
    return value


@dataclass(frozen=True)
class LegacyKey:
    """Where the value of an old key belongs.

    Attributes:
        path: the new key under ``vocoder_cudagraph``, in steps, e.g. ``("targets", "model.target", "sizes")``.
        read: from the old form of the value to the new one.
    """

    path: tuple[str, ...]
    read: Callable[[object], object] = _unchanged


@dataclass(frozen=True)
class ModelExtensions:
    """What one family of models accepts under ``vocoder_cudagraph`` beside the framework's own keys.

    Attributes:
        family: name of the family; all its Target ids begin with it and a dot.
        stage: the keys that its Targets share.
        targets: for every Target id, the keys of that Target alone.
        legacy: old keys of a connector's ``extra`` block that are graph policy.
    """

    family: str
    stage: type[BaseModel]
    targets: Mapping[str, type[BaseModel]]
    legacy: Mapping[str, LegacyKey] = field(default_factory=dict)


@dataclass(frozen=True)
class ExtensionValues:
    """Extension keys as they were read, each checked by the class that declares it.

    Attributes:
        stage: keys that the Targets of a model share.
        targets: keys of single Targets, by Target id.
        path: where they were read, for errors; two configurations may differ in it and be equal.
    """

    stage: dict[str, Any] = field(default_factory=dict)
    targets: dict[str, dict[str, Any]] = field(default_factory=dict)
    path: str = field(default="vocoder_cudagraph", compare=False)

    def of_stage(self, keys: type[E]) -> E:
        """The shared keys of one model, with its defaults where a key is absent."""
        return validated(keys, _only(self.stage, keys), root=self.path)

    def of_target(self, target_id: str, keys: type[E]) -> E:
        """The keys of one Target, with its defaults where a key is absent."""
        return validated(keys, _only(self.targets.get(target_id, {}), keys), root=f"{self.path}.targets.{target_id}")

    def check_model(self, extensions: ModelExtensions | None) -> None:
        """Refuse keys that this model does not declare; when they were read, it was enough that some model did.

        Raises:
            ConfigError: naming the first such key and those that are accepted.
        """
        stage = set(extensions.stage.model_fields) if extensions else set()
        _accept_only(self.path, self.stage, FRAMEWORK_KEYS | stage)
        for target_id, values in self.targets.items():
            own = extensions.targets.get(target_id) if extensions else None
            _accept_only(f"{self.path}.targets.{target_id}", values, TARGET_KEYS | set(own.model_fields if own else ()))


_DECLARED: dict[str, ModelExtensions] = {}


def declare_extensions(extensions: ModelExtensions) -> None:
    """Make a family's keys known to every configuration that is read from now on. A model's module does so at import.

    Raises:
        ConfigError: the family was declared differently before, or the declaration contradicts the framework's own keys.
    """
    family = extensions.family
    if _DECLARED.get(family, extensions) != extensions:
        raise ConfigError(f"The extension keys of {family!r} are declared already, and differently. One module declares a family.")
    _check_names(family, extensions.stage.model_fields, FRAMEWORK_KEYS | CHUNK_KEYS | {"components"})
    for target_id, keys in extensions.targets.items():
        if not target_id.startswith(f"{family}."):
            raise ConfigError(f"Target ids of {family!r} begin with '{family}.', got {target_id!r}.")
        _check_names(target_id, keys.model_fields, TARGET_KEYS | CHUNK_KEYS)
    _DECLARED[family] = extensions


def declared_extensions() -> tuple[ModelExtensions, ...]:
    """All families that were declared so far."""
    return tuple(_DECLARED.values())


def graph_key_homes(path: str) -> dict[str, str]:
    """For every key that is known under ``vocoder_cudagraph``, and every old name of one: where it belongs."""
    homes = dict.fromkeys(FRAMEWORK_KEYS.union(*(known.stage.model_fields for known in declared_extensions())), path)
    for known in declared_extensions():
        for old, new in known.legacy.items():
            homes.setdefault(old, joined(path, ".".join(new.path)))
    return homes


def with_targets_key(data: object, path: str) -> tuple[dict[str, Any], str]:
    """The section with its Targets under ``targets``, and the path that they were read from.

    Raises:
        ConfigError: it is no mapping, or names its Targets under both ``targets`` and ``components``.
    """
    section = as_mapping(data, path)
    if "components" not in section:
        return section, f"{path}.targets"
    if "targets" in section:
        raise ConfigError(f"{path}: 'targets' and 'components' are two names of one key. Keep one of them.")
    section["targets"] = section.pop("components")
    return section, f"{path}.components"


def move_legacy_keys(source: dict[str, Any], source_path: str, section: dict[str, Any], path: str) -> None:
    """Move old keys out of ``source`` to where they belong in ``section``, with a warning each. Both may be the same dict.

    Raises:
        ConfigError: the new key is there too.
    """
    for known in declared_extensions():
        for old, new in known.legacy.items():
            if old not in source or (source is section and new.path == (old,)):
                continue
            value, name = source.pop(old), ".".join(new.path)
            if value is None:
                continue
            holder = section
            for step in new.path[:-1]:
                holder[step] = as_mapping(holder.get(step), joined(path, step))
                holder = holder[step]
            if new.path[-1] in holder:
                raise ConfigError(f"{source_path}.{old} is the former place of {path}.{name}, which is given too. Keep the new one.")
            warnings.warn(f"{source_path}.{old} is the former place of {path}.{name} and read as that. Move it there.", stacklevel=2)
            holder[new.path[-1]] = new.read(value)


def read_graph_section(data: object, path: str, *, chunk_home: str) -> tuple[VocoderGraphSettings, ExtensionValues]:
    """A ``vocoder_cudagraph`` section: the framework's settings, and the keys of models and Targets.

    Args:
        data: the section.
        path: where it stands in the configuration.
        chunk_home: where chunk-delivery keys belong in this configuration.

    Raises:
        ConfigError: a key that neither the framework nor a declared model accepts, a Target that its family does not have, or
            a value of the wrong type or out of range.
    """
    section, targets_path = with_targets_key(data, path)
    move_legacy_keys(section, path, section, path)
    known = declared_extensions()
    accepted = FRAMEWORK_KEYS.union(*(extensions.stage.model_fields for extensions in known))
    in_connector = dict.fromkeys(CHUNK_KEYS, chunk_home)
    of_targets = TARGET_KEYS.union(*(keys.model_fields for extensions in known for keys in extensions.targets.values()))
    homes = {**dict.fromkeys(of_targets, f"{targets_path}.<id>"), **in_connector}
    _accept_only(path, section, accepted, homes)

    framework = {key: value for key, value in section.items() if key in FRAMEWORK_KEYS}
    stage = {key: value for key, value in section.items() if key not in FRAMEWORK_KEYS}
    targets: dict[str, dict[str, Any]] = {}
    framework["targets"] = {}
    for target_id, overrides in as_mapping(section.get("targets"), targets_path).items():
        here = f"{targets_path}.{target_id}"
        values = as_mapping(overrides, here)
        keys = _keys_of_target(target_id, here)
        own = set(keys.model_fields) if keys else set()
        _accept_only(here, values, TARGET_KEYS | own, {**dict.fromkeys(accepted, path), **in_connector})
        framework["targets"][target_id] = {key: value for key, value in values.items() if key in TARGET_KEYS}
        extra = {key: value for key, value in values.items() if key in own}
        if keys and extra:
            validated(keys, extra, root=here)
            targets[target_id] = extra
    settings = validated(VocoderGraphSettings, framework, root=path, paths={"targets": targets_path})
    _check_stage_values(stage, path)
    return settings, ExtensionValues(stage, targets, path)


def _keys_of_target(target_id: str, path: str) -> type[BaseModel] | None:
    """The class that declares a Target's keys; None if no declared family is concerned."""
    for extensions in declared_extensions():
        if target_id in extensions.targets:
            return extensions.targets[target_id]
        if target_id.startswith(f"{extensions.family}."):
            hint = did_you_mean(target_id, extensions.targets)
            raise ConfigError(f"{path}: no such Target.{hint} Declared: {', '.join(sorted(extensions.targets))}")
    return None


def _check_stage_values(values: Mapping[str, Any], path: str) -> None:
    """Every value satisfies a family that declares its key. Which family will run is not known yet."""
    unsettled, problems = set(values), []
    for extensions in declared_extensions():
        own = _only(values, extensions.stage)
        try:
            validated(extensions.stage, own, root=path)
        except ConfigError as error:
            problems.append(error)
        else:
            unsettled -= set(own)
    if unsettled:
        raise problems[0]


def _only(values: Mapping[str, Any], keys: type[BaseModel]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key in keys.model_fields}


def _accept_only(path: str, given: Iterable[str], accepted: Iterable[str], homes: Mapping[str, str] | None = None) -> None:
    names = set(accepted)
    for key in given:
        if key not in names:
            raise unknown_key(path, key, names, homes)


def _check_names(owner: str, given: Iterable[str], taken: Iterable[str]) -> None:
    both = sorted(set(given) & set(taken))
    if both:
        raise ConfigError(f"{owner!r} declares {', '.join(both)}, which the framework reads itself. Choose another name.")
