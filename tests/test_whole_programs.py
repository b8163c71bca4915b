"""Damaged whole programs: a reader ends or refuses them, and hosts read what it lets through.

`FAIRWAY_PROGRAMS` is the number of programs, and `FAIRWAY_SEED` determines them.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_dataflow import CHAIN, EDGES

from fairway import mpmd
from fairway.host import batches, ifrt_ir
from fairway.host.checking import Checker, CheckKind, MalformedError
from fairway.host.screening import RefusedError

PROGRAMS = int(os.environ.get("FAIRWAY_PROGRAMS", "300"))
SEED = int(os.environ.get("FAIRWAY_SEED", "20261128"))
WORD = re.compile(r"[@%#!]?[\w.:]+|[^\w\s]")
NUMBERS = ("0", "1", "2", "3", "4", "8", "9", "64", "-1", "4294967296", "9223372036854775807")


def changed(chance: random.Random, text: str) -> str:
    """Returns a program of which up to two words are exchanged, repeated or left out."""
    for _ in range(chance.randrange(3)):
        words = list(WORD.finditer(text))
        word = chance.choice(words)
        alike = [other[0] for other in words if other[0][0] == word[0][0]]
        match chance.randrange(8):
            case 0:
                new = chance.choice(words)[0]
            case 1:
                new = f"{word[0]} {word[0]}"
            case 2:
                new = ""
            case _ if word[0].isdigit():
                new = chance.choice(NUMBERS)
            case _:
                new = chance.choice(alike)
        text = text[: word.start()] + new + text[word.end() :]
    return text


def main() -> None:
    """Damages programs, and has them read; the checker forks, so JAX must not be here yet."""
    chance, checker, context = random.Random(SEED), Checker(), mpmd.context()
    read = 0
    for number in range(PROGRAMS):
        program = changed(chance, chance.choice((CHAIN, EDGES)))
        try:
            bytecode = checker.check(CheckKind.IFRT_IR, program.encode())
        except MalformedError:
            continue
        try:
            found = ifrt_ir.read(bytecode, context)
            batched = batches.batch(found, context)
            assert found.text()
            assert batched.text()
            assert len(batched.functions()) <= len(found.nodes)
            read += 1
        except RefusedError:
            continue
        except Exception as error:
            raise AssertionError(f"program {number} of seed {SEED}:\n{program}") from error
    checker._control.close()
    assert read > PROGRAMS // 10, f"{read} of {PROGRAMS} programs were read"


@pytest.mark.timeout(7200)
def test_damaged_whole_programs() -> None:
    tests = Path(__file__).resolve().parent
    path = os.pathsep.join([str(tests), str(tests.parent / "benchmarks"), *sys.path])
    ended = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


if __name__ == "__main__":
    main()
