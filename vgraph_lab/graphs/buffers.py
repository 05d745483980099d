"""Static buffers of one graph: names stay bound to the tensors that it reads."""

from __future__ import annotations

import copy
from typing import Any, NoReturn

from torch import Tensor

from vgraph_lab.errors import LifecycleError

__all__ = ["StaticBuffers"]


class StaticBuffers(dict[str, Tensor]):
    """What a Routine allocated, by name. Tensors are written to; names cannot be bound to other tensors.

    A graph reads the addresses of its capture, so a name that is bound anew would leave it on the old values without a word.
    """

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise LifecycleError(
            f"the static buffers {', '.join(map(repr, self))} cannot be replaced, added to or removed: the graph goes on reading the "
            "tensors that it was captured with. Copy into them: buffers[name].copy_(values), or buffers[name][:rows].copy_(values)."
        )

    def __copy__(self) -> dict[str, Tensor]:
        return dict(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Tensor]:
        return copy.deepcopy(dict(self), memo)

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse
