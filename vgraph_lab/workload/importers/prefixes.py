"""Who wrote a line, behind whatever was put before it.

::

    (Worker pid=2622228) [Stage-1] INFO 03-14 15:41:06 [cuda_graph.py:94] message      vLLM, vllm-omni
    INFO 12-19 22:58:27 model_runner.py:1415] message                                  older vLLM
    pid=4711 message                                                                   vllm-omni's own statistics file
    [2026-08-26 10:00:00 TP0] message                                                  SGLang
    worker-1  | message                                                                docker compose

The process is made of what a prefix says: its name and pid, the stage, the rank, the container. It is empty if none of
these is there.
"""

from __future__ import annotations

import re

__all__ = ["split_prefix"]

_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_CONTAINER = re.compile(r"^(?!INFO|WARNING|ERROR|DEBUG)([A-Za-z][\w.-]*)\s+\|\s")
_PART = re.compile(
    r"\s*(?:"
    r"\((?P<worker>[A-Za-z_][\w-]*(?:\s+pid=\d+)?)\)"
    r"|(?P<pid>pid=\d+)(?=\s)"
    r"|\[(?P<stage>Stage-\d+)\]"
    r"|\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,\d]*(?:Z|[+-]\d\d:?\d\d)?(?P<rank>(?: [A-Z]{2,3}\d+)*)\]?"
    r"|(?:std(?:out|err) [FP])"
    r"|(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)(?=[\s:])"
    r"|\d\d-\d\d \d\d:\d\d:\d\d"
    r"|\[[\w./-]+\.(?:py|cc|cpp):\d+\]"
    r"|[\w./-]+\.py:\d+\]"
    r"|\[[\w-]+\](?=\s+(?:DEBUG|INFO|WARNING|ERROR))"
    r")"
)


def split_prefix(line: str) -> tuple[str, str]:
    """A line as (process, message). Spaces at the message's beginning and colours are gone."""
    text = _COLOUR.sub("", line) if "\x1b" in line else line
    names: list[str] = []
    container = _CONTAINER.match(text)
    position = 0
    if container:
        names.append(container[1])
        position = container.end()
    while (part := _PART.match(text, position)) is not None and part.end() > position:
        position = part.end()
        name = " ".join(filter(None, (part["worker"], part["pid"], part["stage"], (part["rank"] or "").strip())))
        if name and name not in names:
            names.append(name)
    return " ".join(names), text[position:].strip()
