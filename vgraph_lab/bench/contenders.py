"""Who is compared: forms of our own, and peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vgraph_lab.config import ConnectorConfig
from vgraph_lab.errors import InputError, MissingExtraError, did_you_mean
from vgraph_lab.qwen3_tts.decoder import Code2WavDecoder

from .contender import Contender, NotRunError, Streams
from .own_contenders import OWN, Form, RunnerContender
from .peers import LoadedPeer, Peer, PeerStream, PeerUnavailableError, available_peers
from .runners import Progress

__all__ = ["NOT_ASKED", "build", "choose"]

NOT_ASKED = "not asked for"
"""Why a contender is left out that was not named, when others were."""


@dataclass
class _PeerContender:
    name: str
    what: str
    loaded: LoadedPeer
    device: torch.device
    facts: dict[str, Any]

    def start(self, rows: int) -> Streams:
        return _PeerStreams(self.loaded.start(rows), self.device)

    def close(self) -> None:
        del self.loaded


class _PeerStreams:
    def __init__(self, stream: PeerStream, device: torch.device) -> None:
        self._stream, self._device = stream, device

    def prepare(self, codes: Tensor) -> Callable[[], Sequence[Tensor]]:
        stream, device = self._stream, self._device

        def run() -> Sequence[Tensor]:
            waveform: Tensor = stream.chunk(codes.to(device, non_blocking=True)).float()
            return waveform.unbind(0)

        return run

    def close(self) -> None:
        del self._stream


def choose(asked: Sequence[str] | None) -> tuple[dict[str, Form | Peer], dict[str, str]]:
    """Contenders to build, in the order in which they are shown, and those that are left out, with the reason.

    Args:
        asked: names; ``all`` stands for every one. None: every one that does not have to be asked for.

    Raises:
        InputError: a name that does not exist.
    """
    peers, broken = available_peers()
    for name in [name for name in peers if name in OWN]:
        del peers[name]
        broken[f"peer {name}"] = "it calls itself as one of our own contenders is called"
    known: dict[str, Form | Peer] = {**OWN, **peers}
    unknown = [name for name in asked or () if name not in {*known, *broken, "all"}]
    if unknown or asked == []:
        names = ", ".join(["all", *known])
        raise InputError(
            f"no contender {unknown[0] if unknown else ''!r}.{did_you_mean(unknown[0], known) if unknown else ''} There are: {names}."
        )
    takes_all = asked is not None and "all" in asked
    chosen: dict[str, Form | Peer] = {}
    left_out: dict[str, str] = {}
    for name, contender in known.items():
        reason = contender.only_if_asked if isinstance(contender, Form) else None
        if takes_all or name in (asked or ()) or (asked is None and reason is None):
            chosen[name] = contender
        elif asked is None and reason is not None:
            left_out[name] = reason
        else:
            left_out[name] = NOT_ASKED
    return chosen, {**left_out, **broken}


def build(
    name: str, kind: Form | Peer, decoder: Code2WavDecoder, connector: ConnectorConfig, batch_sizes: Sequence[int], progress: Progress
) -> Contender:
    """Make a contender ready.

    Raises:
        NotRunError: it cannot run here.
    """
    if isinstance(kind, Form):
        return RunnerContender(name, kind, decoder, connector, batch_sizes, progress)
    progress(f"{name}: loading")
    try:
        loaded = kind.load(decoder.state_dict(), decoder.geometry, decoder.device, decoder.dtype)
    except (MissingExtraError, PeerUnavailableError) as error:
        raise NotRunError(str(error)) from error
    except Exception as error:  # somebody else's code must not end the others' measurement
        raise NotRunError(f"its adapter failed to load ({type(error).__name__}: {error})") from error
    facts = {"form": None, "state_bytes_per_request": loaded.state_bytes_per_request}
    return _PeerContender(name, kind.what, loaded, decoder.device, facts)
