"""The configuration of one stage: how chunks arrive, which graphs exist, and what the model adds to that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Le
from pydantic import BaseModel, Field, PositiveInt, PrivateAttr

from .connector import ConnectorConfig
from .deploy import deploy_sections, is_deploy, read_deploy_file
from .extensions import ExtensionValues, ModelExtensions, read_graph_section
from .sections import stage_sections
from .settings import VocoderGraphSettings
from .validation import Settings, as_mapping, validated

__all__ = ["StageConfig"]

E = TypeVar("E", bound=BaseModel)


class StageConfig(Settings):
    """One code2wav stage.

    Built from YAML, from a mapping of the same layout, or in Python from the framework's own fields. Keys of a model stand
    beside the framework's own in the ``vocoder_cudagraph`` section; :meth:`extension` returns them.

    Attributes:
        async_chunk: chunks are streamed; False decodes whole utterances in windows.
        connector: chunk delivery.
        cudagraph_mode: as vLLM names it; NONE switches all graphs off.
        enforce_eager: True switches all graphs off too.
        max_num_seqs: the most requests that may be live at a time.
        vocoder_cudagraph: policy of the graph Manager.
    """

    async_chunk: bool = True
    connector: ConnectorConfig = Field(default_factory=ConnectorConfig)
    cudagraph_mode: Literal["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"] = "FULL"
    enforce_eager: bool = False
    max_num_seqs: Annotated[PositiveInt, Le(65_536)] = 64
    vocoder_cudagraph: VocoderGraphSettings = Field(default_factory=VocoderGraphSettings)
    _extensions: ExtensionValues = PrivateAttr(default_factory=ExtensionValues)

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        """The fields, and the keys of the model as they were read."""
        yield from super().__repr_args__()
        if self._extensions.stage or self._extensions.targets:
            yield "extensions", {**self._extensions.stage, **({"targets": self._extensions.targets} if self._extensions.targets else {})}

    @classmethod
    def from_yaml(cls, path: str | Path) -> StageConfig:
        """The stage that a file describes: a stage's own file, or a deploy file of vllm-omni.

        Of a deploy file, the code2wav stage and the ``extra`` block of the connector that feeds it are read, on top of the
        files that ``base_config`` names; the rest configures other components. A deploy file without
        ``initial_codec_chunk_frames`` lets the first chunk depend on the load.

        Raises:
            ConfigError: the file cannot be read, is no YAML, repeats a key, or :meth:`from_dict` refuses its content.
        """
        return cls.from_dict(read_deploy_file(Path(path)))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StageConfig:
        """The stage that a mapping describes, in the layout of either file.

        Raises:
            ConfigError: an unknown key, an unknown Target of a declared model, a wrong type or a value out of range; with the
                path of the key and the nearest valid one.
        """
        content = as_mapping(data, "")
        own = frozenset(cls.model_fields)
        sections = deploy_sections(content) if is_deploy(content) else stage_sections(content, own)
        connector = validated(ConnectorConfig, sections.connector, root=sections.connector_path)
        graphs, extensions = read_graph_section(sections.graphs, sections.graphs_path, chunk_home=sections.connector_path)
        fields = {**sections.values, "connector": connector, "vocoder_cudagraph": graphs}
        config = validated(cls, fields, paths=sections.paths)
        config._extensions = extensions
        return config

    def to_dict(self) -> dict[str, Any]:
        """The stage in the layout that :meth:`from_dict` reads, keys of the model included."""
        content = self.model_dump()
        graphs = content["vocoder_cudagraph"]
        graphs.update(self._extensions.stage)
        for target_id, values in self._extensions.targets.items():
            graphs["targets"].setdefault(target_id, {}).update(values)
        return content

    @property
    def graph_settings(self) -> VocoderGraphSettings:
        """The Manager's policy, with graphs off if the stage says so."""
        off = self.enforce_eager or self.cudagraph_mode == "NONE"
        return self.vocoder_cudagraph.model_copy(update={"enforce_eager": True}) if off else self.vocoder_cudagraph

    def extension(self, keys: type[E]) -> E:
        """The keys that a model's Targets share, with the model's defaults where a key is absent.

        Raises:
            ConfigError: a value that ``keys`` does not accept.
        """
        return self._extensions.of_stage(keys)

    def target_extension(self, target_id: str, keys: type[E]) -> E:
        """The keys of one Target, with its defaults where a key is absent.

        Raises:
            ConfigError: a value that ``keys`` does not accept.
        """
        return self._extensions.of_target(target_id, keys)

    def check_model(self, extensions: ModelExtensions | None, target_ids: Iterable[str]) -> None:
        """Refuse what this model does not have: to be called when it is loaded.

        Args:
            extensions: what the model declares; None if it declares nothing.
            target_ids: its Targets.

        Raises:
            ConfigError: an extension key that the model does not declare, or overrides for a Target that it does not have.
        """
        self._extensions.check_model(extensions)
        self.vocoder_cudagraph.check_target_ids(target_ids)
