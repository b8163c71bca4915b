"""Steps from files of any kind, as step graphs."""

from __future__ import annotations

from pathlib import Path

from fairway import _native, capture
from fairway.communication.graphs import of_program
from fairway.errors import GraphError
from fairway.formats.chakra_steps import find_traces, read_step
from fairway.formats.flexflow import read_flexflow

__all__ = ["GRAPHS", "is_graph", "read_graph"]

GRAPHS = (".fw", ".step", ".fbuf")
"""Suffixes of captured programs, step graphs, and FlexFlow's task graphs."""


def is_graph(path: Path) -> bool:
    """Is a path, by its name, that of a step of devices that differ?"""
    return path.suffix in GRAPHS or path.is_dir()


def read_graph(path: Path) -> _native.StepGraph:
    """Reads the step graph of a file, or of a folder of Chakra's traces.

    Devices that compute together in a captured program are one device.

    Raises:
        CaptureError, GraphError: it holds no step; says where.
        OSError: it cannot be read.
    """
    if path.is_dir():
        return read_step(find_traces(path))
    if path.suffix == ".fw":
        return of_program(capture.read(path))
    if path.suffix == ".fbuf":
        return read_flexflow(path)
    try:
        return _native.StepGraph.parse(path.read_text())
    except (ValueError, UnicodeDecodeError) as error:
        raise GraphError(f"{path} holds no step graph: {error}") from None
