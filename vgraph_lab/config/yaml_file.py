"""Reading YAML strictly: one document of keys and values, safe tags only, no key twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from vgraph_lab.errors import ConfigError, did_you_mean

from .validation import as_mapping

__all__ = ["read_yaml"]


class _DuplicateKeyError(yaml.YAMLError):
    """A mapping names a key twice."""


class _StrictLoader(yaml.SafeLoader):
    """Refuses a repeated key, of which YAML loaders silently take the last.

    The check comes before keys are merged with ``<<``, which may be overridden.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):  # two << are a repeated key, too
                line = key.start_mark.line + 1
                if key.value in seen:
                    raise _DuplicateKeyError(f"line {line} repeats the key {key.value!r} of line {seen[key.value]}. Keep one of them.")
                seen[key.value] = line
        return node


def read_yaml(path: Path) -> dict[str, Any]:
    """The content of a YAML file.

    Raises:
        ConfigError: the file cannot be read, is empty, is no YAML, repeats a key, or holds something else than keys and values.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        siblings = [p.name for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        raise ConfigError(f"{path}: no such file.{did_you_mean(path.name, siblings)}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not text in UTF-8: {error}. Is it a YAML file?") from error
    except (OSError, ValueError) as error:  # ValueError: a path that no system takes
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    try:
        content = yaml.load(text, Loader=_StrictLoader)  # a SafeLoader
    except _DuplicateKeyError as error:
        raise ConfigError(f"{path}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deeply.") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a value that looks like a date and is none
        raise ConfigError(f"{path}: is not YAML that can be read here: {error}") from error
    if content is None:
        raise ConfigError(f"{path}: is empty. Write the keys of a stage, or leave the file out for the defaults.")
    return as_mapping(content, str(path))
