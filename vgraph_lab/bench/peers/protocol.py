"""What an adapter to another implementation of the decoder is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from vgraph_lab.errors import VGraphLabError
from vgraph_lab.qwen3_tts.geometry import DecoderGeometry

__all__ = ["LoadedPeer", "Peer", "PeerStream", "PeerUnavailableError"]


class PeerUnavailableError(VGraphLabError, RuntimeError):
    """A peer cannot run here; the message is the reason, and what would help."""


class PeerStream(Protocol):
    """Some streams that are decoded in step, from their first frame on."""

    def chunk(self, codes: Tensor) -> Tensor:
        """Decode the next frames of every stream, as the peer's users would.

        Args:
            codes: int64 [B, num_quantizers, n] on the device.

        Returns:
            Waveform of these frames, [B, n * samples_per_frame], any float dtype, on the device. The call need not wait for it.
        """


class LoadedPeer(Protocol):
    """A peer with its weights on a device.

    Attributes:
        state_bytes_per_request: memory that a stream keeps between chunks; None if that is not known.
    """

    state_bytes_per_request: int | None

    def start(self, rows: int) -> PeerStream:
        """Begin ``rows`` streams without a reference. Earlier ones are not continued any more."""


class Peer(Protocol):
    """An adapter, made without arguments; making one imports nothing of the peer's.

    Attributes:
        name: as it is asked for and shown.
        what: how it decodes a stream, in a few words.
    """

    name: str
    what: str

    def load(self, weights: Mapping[str, Tensor], geometry: DecoderGeometry, device: torch.device, dtype: torch.dtype) -> LoadedPeer:
        """Make it ready.

        Args:
            weights: by the published checkpoint's names without the prefix ``decoder.``, in ``dtype`` on ``device``. Copy what is changed.
            geometry: of the decoder.
            device: where it is to run.
            dtype: of weights and activations.

        Raises:
            MissingExtraError: its package is not installed.
            PeerUnavailableError: it cannot run here, or not with this geometry or dtype.
        """
