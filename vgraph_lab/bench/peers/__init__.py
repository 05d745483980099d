"""Other implementations of the same decoder, measured beside ours where they are installed. Adapters only, none of their code.

Anyone can add one: a package declares a class with the methods of :class:`Peer` under the entry point group ``vgraph_lab.peers``::

    [project.entry-points."vgraph_lab.peers"]
    my-runner = "my_package.adapter:MyPeer"

``vgraph-lab bench compare`` loads it with the measured weights, plays the same codes through it, and lists it beside the others.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from .protocol import LoadedPeer, Peer, PeerStream, PeerUnavailableError
from .qwen_tts import QwenTTSPeer

__all__ = ["ENTRY_POINTS", "LoadedPeer", "Peer", "PeerStream", "PeerUnavailableError", "QwenTTSPeer", "available_peers"]

ENTRY_POINTS = "vgraph_lab.peers"
"""The entry point group."""


def available_peers() -> tuple[dict[str, Peer], dict[str, str]]:
    """Adapters by name, this package's first; and those that cannot even be made, with the reason. Whether a peer runs, ``load`` says."""
    peers: dict[str, Peer] = {QwenTTSPeer.name: QwenTTSPeer()}
    broken: dict[str, str] = {}
    for point in entry_points(group=ENTRY_POINTS):
        try:
            peer = _made(point)
        except Exception as error:  # noqa: BLE001 - somebody else's code; the reason is shown
            broken[point.name] = f"its adapter {point.value} failed: {type(error).__name__}: {error}"
            continue
        if peer.name in peers:
            broken[point.name] = f"its adapter {point.value} calls itself {peer.name!r}, as another one does"
        else:
            peers[peer.name] = peer
    return peers, broken


def _made(point: EntryPoint) -> Peer:
    peer: Peer = point.load()()
    if not (isinstance(peer.name, str) and isinstance(peer.what, str) and callable(peer.load)):
        raise TypeError("an adapter has the texts 'name' and 'what' and a method 'load'")
    return peer
