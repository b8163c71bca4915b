"""``fairway.place``: the fastest strategy to train a model, on modelled fabrics or on islands."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

from fairway.errors import ConfigError
from fairway.parallel.placing import Placed, StrategyOptions, Training, place_blocks
from fairway.placement.placing import (
    CutPlacement,
    PlacementRequest,
    SearchedPlacement,
    place_model,
)

if TYPE_CHECKING:
    import jax

    Devices = Sequence[Sequence[jax.Device]]

__all__ = ["PlacementRequest", "StrategyOptions", "Training", "place"]

Options = TypeVar("Options", PlacementRequest, StrategyOptions)


@overload
def place(
    model: str | os.PathLike[str],
    on: str,
    options: PlacementRequest | None = None,
    *,
    progress: Callable[[int, int], object] | None = None,
) -> SearchedPlacement | CutPlacement: ...


@overload
def place(
    model: Sequence[Any],
    on: Devices,
    options: StrategyOptions | None = None,
    *,
    training: Training,
    progress: Callable[[int, int], object] | None = None,
) -> Placed: ...


def place(
    model: Any,
    on: Any,
    options: Any = None,
    *,
    training: Training | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Any:
    """Predicts the step time of every strategy to train a model, and ranks the strategies by it.

    A model by name or file is placed on a modelled fabric, as ``fairway place`` does. A sequence of
    flax modules is placed on islands that are up: their blocks are measured, and the result builds
    the trainer.

    Args:
        model: a name or a file, see :func:`fairway.placement.placing.place_model`; or a sequence
            of flax modules, see :func:`fairway.parallel.split`.
        on: a fabric, such as ``"elect-cluster:64"``; or the devices of each island.
        options: a :class:`PlacementRequest`, or :class:`StrategyOptions`.
        training: example, targets, loss and optimizer; for modules.
        progress: called with the number of strategies or blocks evaluated, and their number.

    Returns:
        The strategies that fit in memory, the fastest first.

    Raises:
        ConfigError: model, devices and options do not belong together.
        PlacementError: the model is unknown or invalid.
        CapacityError: no strategy fits in memory.

    Example:
        >>> fairway.place("resnet50", "sip-ring:64").strategies[0].step_s
        >>> training = fairway.Training(tokens, targets, loss, optax.adam(1e-3))
        >>> placed = fairway.place(layers, islands, training=training)
        >>> trainer, parameters = placed.trainer()
        >>> state = trainer.init(parameters)
    """
    if isinstance(model, str | os.PathLike):
        if not isinstance(on, str) or training is not None:
            raise ConfigError(
                f"{os.fspath(model)} is placed on a fabric such as 'elect-cluster:64', without "
                f"training; found {on!r}"
            )
        request = _checked(options, PlacementRequest, "a model by name or file")
        return place_model(os.fspath(model), on, request, progress=progress)
    if isinstance(on, str) or training is None:
        raise ConfigError(
            "modules are placed on the devices of islands, with training=fairway.Training(...); "
            f"found {on!r} and {training!r}"
        )
    strategies = _checked(options, StrategyOptions, "a sequence of modules")
    return place_blocks(model, on, training, strategies, progress=progress)


def _checked(options: Any, expected: type[Options], of: str) -> Options:
    """Returns the options, or the defaults."""
    if options is None:
        return expected()
    if not isinstance(options, expected):
        raise ConfigError(
            f"options of {of} are fairway.{expected.__name__}(...); found {options!r}"
        )
    return options
