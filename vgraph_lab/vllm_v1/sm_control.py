"""A share of the GPU's multiprocessors (SMs) for communication, so that kernels which exchange and kernels which compute fit side by side.

Counterpart of ``SMControlContextManager`` in ``vllm.v1.worker.gpu_ubatch_wrapper`` (0.25.1). Without a share, a matrix product takes
every SM, and an exchange that is launched beside it waits until it is done. The launch is what a graph records, so the share belongs
around captures and eager steps, and changes nothing at a replay.

Libraries differ in what can be set. torch hands matrix products a smaller device (:func:`torch_compute_sms`); NCCL takes its share
once, when a process group is made (``ProcessGroupNCCL.Options().config.max_ctas``), and cannot be told here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType

import torch

from vgraph_lab.errors import ConfigError

__all__ = ["SMControlContextManager", "torch_compute_sms"]


class SMControlContextManager:
    """Within the block, communication has ``comm_sms`` SMs and computation the others; after it, even after an error, each has all.

    On a device without SMs, without a share, or where no library can be told, it does nothing, and says why; vLLM refuses there.

    Args:
        comm_sms: SMs for communication, fewer than the device has; 0 for no share.
        set_comm_sms: tells the communication library its SMs.
        set_compute_sms: tells the compute library its SMs.
        device: whose SMs they are.

    Attributes:
        total_sms: SMs of the device; 0 on a CPU.
        comm_sms: for communication.
        compute_sms: for computation.
        why_inactive: why the block changes nothing; empty if it does.
        num_uses: how often the block was entered, active or not.

    Raises:
        ConfigError: the share is negative, or leaves nothing for computation.
    """

    def __init__(
        self,
        comm_sms: int,
        set_comm_sms: Callable[[int], None] | None = None,
        set_compute_sms: Callable[[int], None] | None = None,
        *,
        device: str | torch.device = "cuda",
    ) -> None:
        place = torch.device(device)
        self.total_sms = torch.cuda.get_device_properties(place).multi_processor_count if place.type == "cuda" else 0
        if comm_sms < 0 or (self.total_sms and comm_sms >= self.total_sms):
            most = f" to {self.total_sms - 1}: {place} has {self.total_sms}, and computation needs one" if self.total_sms else ""
            raise ConfigError(f"comm_sms: must be a number of SMs from 0{most}; got {comm_sms}.")
        self.comm_sms, self.compute_sms, self.num_uses = comm_sms, max(self.total_sms - comm_sms, 0), 0
        self._setters = [
            (setter, sms) for setter, sms in ((set_comm_sms, self.comm_sms), (set_compute_sms, self.compute_sms)) if setter is not None
        ]
        self.why_inactive = self._why_inactive(place)

    @property
    def is_active(self) -> bool:
        """Whether the block changes anything."""
        return not self.why_inactive

    def __enter__(self) -> SMControlContextManager:
        self.num_uses += 1
        if self.is_active:
            with ExitStack() as undo:  # if the second setter fails, the first one's share is given back
                for setter, sms in self._setters:
                    undo.callback(setter, self.total_sms)
                    setter(sms)
                undo.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.is_active:
            with ExitStack() as undo:  # each is restored, whatever becomes of the other
                for setter, _ in self._setters:
                    undo.callback(setter, self.total_sms)

    def _why_inactive(self, device: torch.device) -> str:
        if not self.total_sms:
            return f"{device} has no multiprocessors to share out"
        if not self.comm_sms:
            return "comm_sms is 0: communication has no share of its own"
        return "" if self._setters else "no library was named that could be told its share"

    def __repr__(self) -> str:
        share = f"{self.comm_sms} of {self.total_sms} SMs" if self.is_active else f"inactive: {self.why_inactive}"
        return f"SMControlContextManager({share})"


def torch_compute_sms(total_sms: int) -> Callable[[int], None]:
    """A setter for torch's matrix products, to be passed as ``set_compute_sms``.

    It uses torch's SM carve-out, which torch calls experimental: products that go through cuBLASLt heed it, other kernels do not.

    Args:
        total_sms: of the device; this many means no carve-out.
    """

    def set_compute_sms(sms: int) -> None:
        torch._C._set_sm_carveout_experimental(None if sms >= total_sms else total_sms - sms)

    return set_compute_sms
