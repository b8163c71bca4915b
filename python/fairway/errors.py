"""Errors of Fairway that a person sees."""


class FairwayError(Exception):
    """Something of Fairway failed; the text says what, why and what to try."""


class ConfigError(FairwayError):
    """Settings cannot be read or contradict themselves."""


class StartError(FairwayError):
    """The controller or a host did not start."""


class NotRunningError(FairwayError):
    """No controller is up where one was expected."""


class LaunchOrderError(FairwayError):
    """A host was about to run launches in another order than its island's."""


class ProgramError(FairwayError):
    """A function cannot be traced into a program."""


class ExchangeError(FairwayError):
    """An exchange is asked for that cannot be, or is given arrays that do not fit it."""


class InputError(FairwayError):
    """An input is asked for that hosts cannot make."""


class CaptureError(FairwayError):
    """There is no program to capture, or a file holds none."""


class IslandError(FairwayError):
    """An island cannot be added or taken away."""


class SliceError(FairwayError):
    """There is no place for a slice, or nobody to ask for one."""


class RouteError(FairwayError):
    """Transfers that cannot be scheduled, or a fabric that cannot be."""


class TeamError(FairwayError):
    """Ranks of a team do not go on together.

    Attributes:
        kind: what happened, such as ``Lost``, ``Late``, ``Diverged`` or ``Poisoned``.
        rank: the other rank that it is about, if there is one.
    """

    def __init__(self, kind: str, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.rank = rank


class StepError(FairwayError):
    """A training step cannot be planned."""


class GraphError(FairwayError):
    """A graph cannot be read or planned."""


class PlacementError(FairwayError):
    """A model cannot be described, cut or placed as asked."""


class CapacityError(PlacementError):
    """Devices cannot hold what they are to hold."""
