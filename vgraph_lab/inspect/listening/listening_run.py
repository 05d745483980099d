"""What every listening test is: items in a fixed order, one note of the listener's for each, and a file that holds both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, Self, TypeVar

from pydantic import TypeAdapter

from vgraph_lab.errors import InputError, LifecycleError

from .checks import is_whole
from .json_file import read_json, write_json

__all__ = ["ListeningRun", "Words"]

_VERSION = 1


class _Numbered(Protocol):
    @property
    def number(self) -> int: ...


Item = TypeVar("Item", bound=_Numbered)
Note = TypeVar("Note", bound=_Numbered)


class Words(NamedTuple):
    """What a test calls its things: ``Words("ABX test", "trial", "answer", "answered")``."""

    kind: str
    item: str
    note: str
    noted: str


class ListeningRun(ABC, Generic[Item, Note]):
    """One listener's run: its items, numbered from 1, and the notes so far. Each item is noted once.

    Attributes:
        samples: names of what is heard.
        conditions: names of what is compared.
        seed: from which the items were drawn.
    """

    _WORDS: ClassVar[Words]
    _ADAPTER: ClassVar[TypeAdapter[Any]]  # of what _saved() gives and _restored() takes

    def __init__(self, samples: tuple[str, ...], conditions: tuple[str, ...], seed: int, items: tuple[Item, ...]) -> None:
        self.samples, self.conditions, self.seed = samples, conditions, seed
        self._items = items
        self._notes: dict[int, Note] = {}

    @property
    def is_finished(self) -> bool:
        """Whether everything was answered."""
        return len(self._notes) == len(self._items)

    @property
    def _next(self) -> Item | None:
        return next((item for item in self._items if item.number not in self._notes), None)

    @property
    def _in_order(self) -> tuple[Note, ...]:
        return tuple(self._notes[number] for number in sorted(self._notes))

    def _item(self, number: Any) -> Item:
        if not is_whole(number) or not 1 <= number <= len(self._items):
            item = self._WORDS.item
            raise InputError(f"there is no {item} {number!r}; {item}s are numbered from 1 to {len(self._items)}.")
        return self._items[int(number) - 1]

    def _keep(self, note: Note) -> None:
        """Keep the first note of an item."""
        words, earlier = self._WORDS, self._notes.get(note.number)
        if earlier is not None:
            after = f"{words.item} {self._next.number} is next" if self._next else "the test is finished: read result()"
            what = f"{words.item} {note.number} was {words.noted} already{self._in_brackets(earlier)}"
            raise LifecycleError(f"{what}, and the first {words.note} stands; {after}.")
        self._notes[note.number] = note

    def _in_brackets(self, note: Note) -> str:
        """A note in an error message; nothing where it would tell what the listener must not know."""
        return ""

    def __repr__(self) -> str:
        done = f"{len(self._notes)} of {len(self._items)} {self._WORDS.item}s {self._WORDS.noted}"
        return f"{type(self).__name__}({' | '.join(self.conditions)}: {done}, seed {self.seed})"

    # -------------------------------------------------------------------------------------------------------- on disk

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the run as JSON. An earlier state of this same test is replaced, so it may be called after each answer.

        Args:
            path: where to; folders are made as needed.
            overwrite: replace whatever is there.

        Raises:
            InputError: something else is there, or answers that this test lacks; or none can be written there.
        """
        path = Path(path)
        if path.exists() and not overwrite:
            there = type(self).load(path) if path.is_file() else None
            if there is None or there._items != self._items or not there._notes.items() <= self._notes.items():
                raise InputError(
                    f"{path} holds another test, or {self._WORDS.note}s that this one lacks. "
                    "Choose another name, or ask for overwrite=True."
                )
        write_json(path, self._WORDS.kind, _VERSION, self._saved(), self._ADAPTER)
        return path

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file that :meth:`save` wrote. What is heard, and in which order, is that of the file.

        Raises:
            InputError: it is not there, damaged, something else, or of a newer version.
        """
        saved = read_json(Path(path), cls._WORDS.kind, _VERSION, cls._ADAPTER)
        try:
            return cls._restored(saved)
        except (InputError, LifecycleError) as error:
            raise InputError(f"{path} is damaged: {error}") from None

    @abstractmethod
    def _saved(self) -> Any:
        """What the file holds."""

    @classmethod
    @abstractmethod
    def _restored(cls, saved: Any) -> Self:
        """The run of a file."""
