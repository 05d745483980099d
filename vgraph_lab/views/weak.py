"""Callbacks that do not keep their owner alive: widgets live as long as the kernel, and graphs must not."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ipywidgets as widgets

from vgraph_lab.errors import VGraphLabError

__all__ = ["on_change", "on_click"]


def on_click(button: widgets.Button, action: Callable[[], Any]) -> None:
    """Let a button call a bound method for as long as its object lives; afterwards it says that the cell must run again.

    The object shows the errors of this package itself; any other one goes on to the kernel's log.
    """
    reference = weakref.WeakMethod(action)

    def click(button: widgets.Button) -> None:
        live = reference()
        if live is None:
            button.disabled, button.description = True, "Run the cell again"
            return
        with suppress(VGraphLabError):
            live()

    button.on_click(click)


def on_change(widget: widgets.Widget, trait: str, action: Callable[[], Any]) -> None:
    """Call a bound method after a trait has changed, for as long as its object lives."""
    reference = weakref.WeakMethod(action)

    def changed(_change: Any) -> None:
        live = reference()
        if live is not None:
            live()

    widget.observe(changed, trait)
