"""Training text: the example sentences of WordNet's glosses, joined to utterances of nine words or more."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from vgraph_lab.errors import InputError

__all__ = ["example_sentences", "join_utterances", "wordnet_utterances"]

_PARTS_OF_SPEECH = ("noun", "verb", "adj", "adv")
_SPEAKABLE = re.compile(r"[A-Za-z0-9 ,'\-;:?!.]+")  # what the synthesiser reads without guessing
_FEWEST_WORDS, _MOST_WORDS = 4, 18
_UTTERANCE_WORDS = 9


def wordnet_utterances(folder: Path, *, seed: int = 0) -> list[str]:
    """Utterances from WordNet's database files (Debian: ``/usr/share/wordnet`` of wordnet-base), in a fixed order.

    Raises:
        InputError: the folder lacks a database file.
    """
    sentences: set[str] = set()
    for part in _PARTS_OF_SPEECH:
        path = folder / f"data.{part}"
        if not path.is_file():
            raise InputError(f"{folder} has no data.{part}; expected WordNet's database files (Debian package wordnet-base).")
        sentences.update(example_sentences(path.read_text(encoding="latin-1").splitlines()))
    ordered = sorted(sentences)
    random.Random(seed).shuffle(ordered)  # neighbours in the alphabet would sound alike
    return list(join_utterances(ordered))


def example_sentences(lines: Iterable[str]) -> Iterator[str]:
    """The quoted examples in the glosses of database lines that can be spoken as they stand."""
    for line in lines:
        if line.startswith("  "):  # the licence at the top
            continue
        _, _, gloss = line.partition(" | ")
        for quoted in re.findall(r'"([^"]+)"', gloss):
            sentence = quoted.strip().rstrip(".;,")
            if _FEWEST_WORDS <= len(sentence.split()) <= _MOST_WORDS and _SPEAKABLE.fullmatch(sentence):
                yield sentence


def join_utterances(sentences: Iterable[str]) -> Iterator[str]:
    """Join sentences until an utterance has nine words; each begins with a capital and ends with a stop."""
    parts: list[str] = []
    for sentence in sentences:
        parts.append(sentence[0].upper() + sentence[1:])
        if sum(len(part.split()) for part in parts) >= _UTTERANCE_WORDS:
            yield _finished(parts)
            parts = []
    if parts:
        yield _finished(parts)


def _finished(parts: list[str]) -> str:
    utterance = ". ".join(parts)
    return utterance if utterance[-1] in ".?!" else f"{utterance}."
