"""The text that `train_lm.py` and `pipeline_lm.py` train on, as batches of tokens.

It needs numpy alone, so hosts that make batches themselves import nothing else.
"""

from __future__ import annotations

import itertools
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY_MAX = 128
UNKNOWN = 0  # the token of every character outside the vocabulary
ALL = slice(None)


class BadInputError(ValueError):
    """Invalid user input; the message says what to change."""


@dataclass(frozen=True)
class Corpus:
    """A text as tokens: int32 [characters], each an index into `vocabulary`."""

    tokens: np.ndarray
    vocabulary: list[str]

    def batches(
        self, seed: int, rows: int, sequence: int, part: slice = ALL
    ) -> Iterator[np.ndarray]:
        """Yields random windows endlessly, int32 [rows, sequence + 1]: inputs and shifted targets.

        Only the rows of `part` are made.
        """
        for step in itertools.count():
            random = np.random.default_rng((seed, step))
            starts = random.integers(0, len(self.tokens) - sequence, size=rows)[part]
            yield self.tokens[starts[:, None] + np.arange(sequence + 1)]


def host_batches(
    shard: Any, *, text: str | None, seed: int, rows: int, sequence: int, first_row: int
) -> Iterator[np.ndarray]:
    """Yields a host's rows of the batches of its island, whose rows begin at `first_row`.

    Fairway calls this on hosts; `shard.rows` are the host's rows among those of the island.
    """
    part = slice(first_row + shard.rows.start, first_row + shard.rows.stop)
    corpus = read_corpus(Path(text) if text else None, sequence)
    return corpus.batches(seed, rows, sequence, part)


def read_corpus(path: Path | None, sequence: int) -> Corpus:
    """Reads a text file, or, without a path, the running Python's own standard library.

    Raises BadInputError where the text cannot be read or has no window of `sequence` + 1.
    """
    if path is None:
        sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = "".join(_read_text(source) for source in sources)
    else:
        text = _read_text(path)
    if len(text) <= sequence:
        raise BadInputError(
            f"the text is too short: expected more than {sequence} characters, got {len(text)}; "
            "try another --text or a smaller --sequence"
        )
    return _tokenize(text)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise BadInputError(f"cannot read the text {path}: {error.strerror}") from error


def _tokenize(text: str) -> Corpus:
    """Maps the most frequent characters to tokens 1.. in code point order, the rest to 0."""
    points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    distinct, counts = np.unique(points, return_counts=True)
    frequent = np.argsort(-counts, kind="stable")[: VOCABULARY_MAX - 1]
    kept = np.sort(distinct[frequent])
    table = np.full(int(distinct[-1]) + 1, UNKNOWN, dtype=np.int32)
    table[kept] = np.arange(1, len(kept) + 1, dtype=np.int32)
    return Corpus(table[points], ["\N{REPLACEMENT CHARACTER}", *map(chr, kept.tolist())])
