"""Checking settings, so that every error names the path of its key, what came, and the nearest valid key."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, PositiveInt, ValidationError

from vgraph_lab.errors import ConfigError, did_you_mean

__all__ = ["DistinctSizes", "Settings", "as_mapping", "as_tuple", "config_error", "joined", "unknown_key", "validated"]

Model = TypeVar("Model", bound=BaseModel)


class Settings(BaseModel):
    """Base of all settings: unknown keys are refused, types are not converted, nothing changes afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def as_tuple(value: object) -> object:
    """A list as a tuple: YAML has lists only, and settings are frozen. Anything else as it is."""
    return tuple(value) if isinstance(value, list) else value


def _distinct(sizes: tuple[int, ...]) -> tuple[int, ...]:
    repeated = sorted({size for size in sizes if sizes.count(size) > 1})
    if repeated:
        raise ValueError(f"repeats {', '.join(map(str, repeated))}; name each size once")
    return sizes


DistinctSizes = Annotated[tuple[PositiveInt, ...], BeforeValidator(as_tuple), AfterValidator(_distinct)]
"""Positive whole numbers, each once; a list or a tuple."""


def joined(path: str, key: str) -> str:
    """The path of ``key`` under ``path``; an empty path is the top of the configuration."""
    return f"{path}.{key}" if path else key


def as_mapping(value: object, path: str) -> dict[str, Any]:
    """A section of a configuration as a dict. An empty section (YAML: a key with nothing after it) is an empty dict.

    Raises:
        ConfigError: it is something else, or one of its keys is not a string.
    """
    if value is None:
        return {}
    where = path or "the configuration"
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: must hold keys and values, got {value!r}.")
    for key in value:
        if not isinstance(key, str):
            raise ConfigError(f"{where}: keys must be strings, got {key!r}. Put it in quotes.")
    return dict(value)


def unknown_key(path: str, key: str, accepted: Iterable[str], homes: Mapping[str, str] | None = None) -> ConfigError:
    """The error for ``key`` under ``path``.

    Args:
        path: the section that holds the key; empty at the top level.
        key: the key that nobody knows there.
        accepted: the keys that are known there.
        homes: keys that are known elsewhere, and where that is.
    """
    names = sorted(accepted)
    home = (homes or {}).get(key)
    hint = f" It belongs under '{home}'." if home else did_you_mean(key, names)
    return ConfigError(f"{joined(path, key)}: unknown key.{hint} Accepted: {', '.join(names) or 'none'}")


def validated(model: type[Model], data: Mapping[str, Any], *, root: str = "", paths: Mapping[str, str] | None = None) -> Model:
    """``model.model_validate(data)`` with errors that name each key's path and the nearest valid key.

    Args:
        model: what ``data`` must be.
        data: its keys and values.
        root: the path of ``data`` in the configuration; empty for the whole of it. Validators find it in their context.
        paths: paths of first-level keys that were not read from under ``root``.

    Raises:
        ConfigError: with all problems that were found.
    """
    try:
        return model.model_validate(as_mapping(data, root), context={"root": root})
    except ValidationError as error:
        raise config_error(error, model, root=root, paths=paths) from None


def config_error(error: ValidationError, model: type[BaseModel], *, root: str = "", paths: Mapping[str, str] | None = None) -> ConfigError:
    """All problems that were found, as one error; see :func:`validated`."""
    return ConfigError("; ".join(_explain(model, root, paths or {}, problem) for problem in error.errors()))


def _explain(model: type[BaseModel], root: str, paths: Mapping[str, str], problem: Any) -> str:
    location = [str(part) for part in problem["loc"]]
    steps = [root]
    for part in location:
        steps.append(paths[part] if len(steps) == 1 and part in paths else joined(steps[-1], part))
    if problem["type"] == "extra_forbidden":
        return str(unknown_key(steps[-2], location[-1], _fields_at(model, location[:-1])))
    raised = problem.get("ctx", {}).get("error")
    if isinstance(raised, ConfigError) and str(raised).startswith(f"{location[-1] if location else ''}:"):
        return str(raised)  # it names the key itself
    message, given, hint = problem["msg"].removeprefix("Value error, "), problem["input"], ""
    if problem["type"] == "literal_error" and isinstance(given, str):
        names = re.findall(r"'([^']*)'", problem["ctx"]["expected"])
        hint = next(filter(None, (did_you_mean(spelt, names) for spelt in (given, given.upper(), given.lower()))), "")
    if problem["type"] == "tuple_type":
        message = "must be a list, e.g. [1, 4]"
    if problem["type"] == "int_type" and location[-1].endswith("_bytes"):
        message = "must be a whole number of bytes, e.g. 4294967296 for 4 GiB"
    came = "" if isinstance(given, Mapping) else f" (got {given!r})"
    return f"{steps[-1] or 'the configuration'}: {message}{came}{hint and '.' + hint}"


def _fields_at(model: type[BaseModel], location: list[str]) -> list[str]:
    """Field names of the settings nested at ``location``, through mappings of settings too."""
    current: Any = model
    for part in location:
        nested = isinstance(current, type) and issubclass(current, BaseModel)
        current = current.model_fields[part].annotation if nested else get_args(current)[-1]  # dict[str, Settings]
    return list(current.model_fields)
