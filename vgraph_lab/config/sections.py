"""A configuration taken apart: which values, and where each was read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .connector import ConnectorConfig
from .extensions import graph_key_homes
from .validation import as_mapping, unknown_key

__all__ = ["StageSections", "stage_sections"]


@dataclass(frozen=True)
class StageSections:
    """The parts of one stage's configuration.

    Attributes:
        values: plain keys of the stage.
        connector: chunk delivery.
        graphs: the ``vocoder_cudagraph`` section.
        connector_path: where ``connector`` was read.
        graphs_path: where ``graphs`` was read.
        paths: where those of ``values`` were read that do not stand at the top.
    """

    values: Mapping[str, Any]
    connector: Mapping[str, Any]
    graphs: Any
    connector_path: str = "connector"
    graphs_path: str = "vocoder_cudagraph"
    paths: Mapping[str, str] = field(default_factory=dict)


def stage_sections(data: Mapping[str, Any], accepted: frozenset[str]) -> StageSections:
    """The sections of a stage's own configuration.

    Args:
        data: the whole configuration.
        accepted: the keys of a stage.

    Raises:
        ConfigError: an unknown key, with the section where it belongs or the nearest valid one.
    """
    homes = {**graph_key_homes("vocoder_cudagraph"), **dict.fromkeys(ConnectorConfig.model_fields, "connector")}
    for key in data:
        if key not in accepted:
            raise unknown_key("", key, accepted, homes)
    connector = as_mapping(data.get("connector"), "connector")
    for key in connector:
        if key not in ConnectorConfig.model_fields:
            raise unknown_key("connector", key, ConnectorConfig.model_fields, graph_key_homes("vocoder_cudagraph"))
    values = {key: value for key, value in data.items() if key not in ("connector", "vocoder_cudagraph")}
    return StageSections(values, connector, data.get("vocoder_cudagraph"))
