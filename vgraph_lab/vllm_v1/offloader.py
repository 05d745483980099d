"""Weights that live in host memory and are fetched ahead of the layers that need them.

Counterpart of ``vllm.model_executor.offloader.PrefetchOffloader`` (0.25.1). Of the layers of a model, some keep their weights on the
host. Each has one of a few buffers on the device, the same one always, so that graphs may hold its address; its weights are copied
there on a stream of its own while earlier layers compute::

    compute   layer 0 ── layer 1 ── wait, layer 2 ── layer 3 ── wait, layer 4 ──
    copies        ╰─ to layer 2 ───╯      ╰───── to layer 4 ────╯     ╰─ to layer 2, for the next pass

Two rules make that work with graphs. A capture must not end while a copy that it began is unjoined (``join_after_forward``, at the
end of each graph and each segment). And a graph cannot wait for a copy that began outside of it, so these are waited for before
each capture and replay (``sync_prev_onload``). On the CPU, copies are done when their call returns, and the same steps happen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from vgraph_lab.errors import ConfigError, LifecycleError

__all__ = ["PrefetchOffloader", "offloader_of"]

_wrapped: WeakKeyDictionary[nn.Module, ref[PrefetchOffloader]] = WeakKeyDictionary()


def offloader_of(layers: Iterable[nn.Module]) -> PrefetchOffloader | None:
    """The offloader that has weights of some of these layers; None if all have their own."""
    return next((holder for layer in layers if layer in _wrapped and (holder := _wrapped[layer]()) is not None), None)


class PrefetchOffloader:
    """Keeps the weights of some layers on the host and prefetches them; an ``Offloader`` of the wrappers.

    Args:
        group_size: layers of a group.
        num_in_group: how many of each group, its last ones, are kept on the host.
        prefetch_step: how many such layers ahead copies run; also the number of buffers on the device.

    Raises:
        ConfigError: a number is out of range.
    """

    def __init__(self, group_size: int, num_in_group: int = 1, prefetch_step: int = 1) -> None:
        if not 1 <= num_in_group <= group_size or prefetch_step < 1:
            raise ConfigError(
                f"offloading needs 1 ≤ num_in_group ≤ group_size and prefetch_step ≥ 1, got num_in_group={num_in_group}, "
                f"group_size={group_size}, prefetch_step={prefetch_step}."
            )
        self.group_size, self.num_in_group, self.prefetch_step = group_size, num_in_group, prefetch_step
        self.host = nn.Module()
        """The weights on the host, as a module: a wrapper takes it among its ``modules``."""
        self._layers: list[nn.Module] = []
        self._weights: list[list[tuple[Tensor, Tensor, Tensor]]] = []  # of each such layer: parameter, its buffer, on the host
        self._hooks: list[RemovableHandle] = []
        self._in_flight: dict[int, torch.cuda.Event | None] = {}  # copies that nobody has waited for; the event is after the copy
        self._stream: torch.cuda.Stream | None = None

    @property
    def num_offloaded(self) -> int:
        """Layers whose weights are on the host."""
        return len(self._layers)

    @property
    def host_bytes(self) -> int:
        """Of the weights on the host."""
        return sum(host.nbytes for weights in self._weights for *_, host in weights)

    def wrap_modules(self, layers: Sequence[nn.Module]) -> None:
        """Take over the layers of a model, which are alike, in the order in which they run; and fetch the first ones.

        Args:
            layers: all of them.

        Raises:
            ConfigError: offloaded layers have different parameters.
            LifecycleError: it has layers already, or another one has some of these.
            Exception: memory ran out; all weights are back then.
        """
        if self._layers:
            raise LifecycleError(
                "this offloader has a model's layers already. Call unwrap_modules(), or make another one for another model."
            )
        if offloader_of(layers) is not None:
            raise LifecycleError(
                "another offloader has weights of these layers: what they hold now may be another layer's. Shut down the runner that has "
                "the model, or call unwrap_modules() of that offloader."
            )
        chosen = [layer for n, layer in enumerate(layers) if n % self.group_size >= self.group_size - self.num_in_group]
        shapes = [[(name, p.shape, p.dtype, p.device) for name, p in layer.named_parameters()] for layer in chosen]
        if any(found != shapes[0] for found in shapes):
            raise ConfigError("offloaded layers share buffers, so they need the same parameters: names, shapes, dtypes and device.")
        device = next(layers[0].parameters()).device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        try:
            with torch.inference_mode(mode=False), torch.no_grad():  # copied into by steps in and outside of that mode
                self._take(chosen)
        except BaseException:
            self.unwrap_modules()
            raise
        self._prefetch_first()

    def unwrap_modules(self) -> None:
        """Give the layers their weights back, on the device, and let go of them. Graphs that have the buffers' addresses must be gone.

        Safe to call twice; afterwards the offloader may take layers again.

        Raises:
            Exception: the device has no room. The layers that are left stay offloaded, and the call may be repeated.
        """
        if self._stream is not None:
            torch.cuda.synchronize(self._stream.device)  # copies to the buffers, and passes that read them
        self._in_flight.clear()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        while self._layers:
            with torch.inference_mode(mode=False):
                own = [host.to(parameter.device, copy=True) for parameter, _, host in self._weights[-1]]
            for (parameter, *_), weight in zip(self._weights.pop(), own, strict=True):
                parameter.data = weight
            del _wrapped[self._layers.pop()]
        self.host, self._stream = nn.Module(), None

    def _take(self, layers: Sequence[nn.Module]) -> None:
        buffers = [[torch.empty_like(p) for p in layer.parameters()] for layer in layers[: self.prefetch_step]]
        for number, layer in enumerate(layers):
            weights: list[tuple[Tensor, Tensor, Tensor]] = []
            self._layers.append(layer)
            self._weights.append(weights)
            _wrapped[layer] = ref(self)
            for parameter, buffer in zip(layer.parameters(), buffers[number % self.prefetch_step], strict=True):
                host = parameter.detach().to("cpu", copy=True)
                host = host.pin_memory() if parameter.is_cuda else host
                self.host.register_buffer(f"layer{number}_{len(weights)}", host)
                parameter.data = buffer
                weights.append((parameter, parameter.detach(), host))
            self._hooks += [layer.register_forward_pre_hook(self._before(number)), layer.register_forward_hook(self._after(number))]

    def sync_prev_onload(self) -> None:
        """Let the current stream wait for copies begun before; called before a capture and before a replay, outside of graphs."""
        self._join()

    def join_after_forward(self) -> None:
        """Join copies that are under way to the current stream; called inside a capture, before it or a segment of it ends."""
        self._join()

    def restart(self) -> None:
        """Fetch the first layers again: a pass has failed half way, so that buffers hold the weights of other layers."""
        self._in_flight.clear()  # their events may belong to a capture that failed: nobody may wait for these
        if self._stream is not None:
            torch.cuda.synchronize(self._stream.device)
        self._prefetch_first()

    def wait_prefetch(self, number: int) -> None:
        """Wait for the weights of the offloaded layer ``number``; nothing to do if its copy was joined before."""
        event = self._in_flight.pop(number, None)
        if event is not None and self._stream is not None:
            event.wait(torch.cuda.current_stream(self._stream.device))

    def start_prefetch(self, number: int) -> None:
        """Begin to copy the weights of the offloaded layer ``number`` to its buffer, after what the current stream has to do."""
        if self._stream is None:
            self._copy(number)
            self._in_flight[number] = None
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            self._copy(number)
            event = torch.cuda.Event()
            event.record()
        self._in_flight[number] = event

    def _copy(self, number: int) -> None:
        with torch.no_grad():
            for _, on_device, host in self._weights[number]:
                on_device.copy_(host, non_blocking=True)

    def _join(self) -> None:
        for number in list(self._in_flight):
            self.wait_prefetch(number)

    def _prefetch_first(self) -> None:
        for number in range(min(self.prefetch_step, self.num_offloaded)):
            self.start_prefetch(number)

    def _before(self, number: int) -> Any:
        def wait(module: nn.Module, args: Any) -> None:
            self.wait_prefetch(number)

        return wait

    def _after(self, number: int) -> Any:
        def prefetch(module: nn.Module, args: Any, output: Any) -> None:
            ahead = number + self.prefetch_step
            if ahead < self.num_offloaded:
                self.start_prefetch(ahead)  # it shares the buffer of this layer, which is done
            if number == self.num_offloaded - 1:
                self._prefetch_first()  # for the next pass; all buffers are free now

        return prefetch
