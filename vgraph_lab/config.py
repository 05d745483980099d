"""Settings of the graph framework, checked at start-up: an error names the path of the key and the nearest valid one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError

from .errors import ConfigError, did_you_mean

__all__ = ["TargetSettings", "VocoderGraphSettings", "validated"]

Model = TypeVar("Model", bound=BaseModel)


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TargetSettings(_Settings):
    """Overrides for one Target. A declared Target is on unless it is disabled here.

    Attributes:
        enabled: False keeps the Target eager; its calls are counted with the reason ``disabled``.
        enable_lazy_capture: capture a graph when a call finds none, if the Routine makes a Descriptor for it.
        max_extra_graphs: cap on lazily captured graphs; 0 means none, None means unbounded.
    """

    enabled: bool = True
    enable_lazy_capture: bool = False
    max_extra_graphs: NonNegativeInt | None = 0


class VocoderGraphSettings(_Settings):
    """Policy of one Manager (``vocoder_cudagraph``).

    Attributes:
        enforce_eager: switch all graphs off: nothing is captured, results are the same.
        max_memory_bytes: limit on static buffers plus graph pool; None means no limit.
        num_warmups: eager runs before each capture. At least one: libraries initialise themselves on first use.
        strict: any failure to capture or bind is an error that rolls everything back.
        debug: check the values of device tensors too, audit every shape before its capture rather than the first of each
            Target, and detect the use of borrowed outputs after their time.
        eviction: what happens when the cap on lazily captured graphs or the memory limit is reached. ``none``: calls that
            need another graph run eager. ``generation``: all graphs are retired together and captured anew as needed.
        log_stats: log the final statistics when the Manager is cleared.
        targets: overrides by Target id.
    """

    enforce_eager: bool = False
    max_memory_bytes: NonNegativeInt | None = None
    num_warmups: PositiveInt = 2
    strict: bool = False
    debug: bool = False
    eviction: Literal["none", "generation"] = "none"
    log_stats: bool = False
    targets: dict[str, TargetSettings] = Field(default_factory=dict)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> VocoderGraphSettings:
        """Settings from a ``vocoder_cudagraph`` mapping.

        Raises:
            ConfigError: unknown key, wrong type or value out of range, with the key's path.
        """
        return validated(cls, data, root="vocoder_cudagraph")

    def check_target_ids(self, declared: Iterable[str]) -> None:
        """Refuse overrides for Targets that nobody declares."""
        known = sorted(declared)
        for target_id in self.targets:
            if target_id not in known:
                hint = did_you_mean(target_id, known)
                raise ConfigError(f"vocoder_cudagraph.targets.{target_id}: no such Target.{hint} Declared: {', '.join(known) or 'none'}.")

    def for_target(self, target_id: str) -> TargetSettings:
        """The settings of one Target."""
        return self.targets.get(target_id, TargetSettings())


def validated(model: type[Model], data: Mapping[str, Any], *, root: str) -> Model:
    """``model.model_validate(data)`` with errors that name each key's path under ``root`` and the nearest valid key."""
    try:
        return model.model_validate(dict(data))
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(model, root, problem) for problem in error.errors())) from None


def _explain(model: type[BaseModel], root: str, problem: Any) -> str:
    location = [str(part) for part in problem["loc"]]
    path = ".".join([root, *location])
    if problem["type"] == "extra_forbidden":
        accepted = _fields_at(model, location[:-1])
        return f"{path}: unknown key.{did_you_mean(location[-1], accepted)} Accepted: {', '.join(sorted(accepted))}"
    return f"{path}: {problem['msg']} (got {problem['input']!r})"


def _fields_at(model: type[BaseModel], location: list[str]) -> list[str]:
    """Field names of the nested model at ``location``. The only nesting is ``targets.<id>``."""
    return list((TargetSettings if location[:1] == ["targets"] and len(location) == 2 else model).model_fields)
