"""Stage and graph settings, checked at start-up: an error names the path of the key and the nearest valid one."""

from .connector import ConnectorConfig
from .extensions import LegacyKey, ModelExtensions, declare_extensions
from .settings import TargetSettings, VocoderGraphSettings
from .stage import StageConfig
from .validation import DistinctSizes, Settings, validated

__all__ = [
    "ConnectorConfig",
    "DistinctSizes",
    "LegacyKey",
    "ModelExtensions",
    "Settings",
    "StageConfig",
    "TargetSettings",
    "VocoderGraphSettings",
    "declare_extensions",
    "validated",
]
