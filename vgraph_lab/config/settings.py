"""What the graph framework itself understands of ``vocoder_cudagraph``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from vgraph_lab.errors import ConfigError, did_you_mean

from .validation import Settings, validated

__all__ = ["TargetSettings", "VocoderGraphSettings"]


class TargetSettings(Settings):
    """Overrides for one Target. A declared Target is on unless it is disabled here.

    Attributes:
        enabled: False keeps the Target eager; its calls are counted with the reason ``disabled``.
        enable_lazy_capture: capture a graph when a call finds none, if the Routine makes a Descriptor for it.
        max_extra_graphs: cap on lazily captured graphs; 0 means none, None means unbounded.
    """

    enabled: bool = True
    enable_lazy_capture: bool = False
    max_extra_graphs: NonNegativeInt | None = 0


class VocoderGraphSettings(Settings):
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
        """Settings from a ``vocoder_cudagraph`` mapping without keys of a model; :class:`StageConfig` reads those too.

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
