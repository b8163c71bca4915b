"""Errors of Fairway that users see."""


class FairwayError(Exception):
    """Base class of Fairway's errors; the text says what failed, why and what to try."""


class ConfigError(FairwayError):
    """Settings cannot be read or contradict each other."""


class StartError(FairwayError):
    """The controller or a host did not start."""


class AgentError(FairwayError):
    """An agent cannot join a controller, or is refused by it."""


class ControllerLostError(AgentError):
    """The controller of an agent does not answer, or not any more."""


class NotRunningError(FairwayError):
    """No controller is running where one was expected."""


class LaunchOrderError(FairwayError):
    """A host was about to run launches in another order than its island's."""


class ProgramError(FairwayError):
    """A function cannot be traced into a program."""


class ExchangeError(FairwayError):
    """An exchange is invalid, or its arrays do not fit it."""


class InputError(FairwayError):
    """An input is invalid, or hosts cannot make it."""


class CaptureError(FairwayError):
    """There is no program to capture, or a file holds none."""


class ReportError(FairwayError):
    """A report cannot be read, or is of another program."""


class IslandError(FairwayError):
    """An island cannot be added or removed."""


class SliceError(FairwayError):
    """No island can hold a slice, or no controller answers the request for it."""


class TokenError(FairwayError):
    """A token cannot be made, listed or revoked."""


class LogError(FairwayError):
    """What was printed cannot be read."""


class TopologyError(FairwayError):
    """A topology cannot be read, or is not of the kind that is needed."""


class RouteError(FairwayError):
    """Transfers cannot be scheduled on a fabric."""


def unreadable(error: OSError | UnicodeDecodeError) -> str:
    """Returns why a file of text cannot be read, for a sentence that names it."""
    return f"{error.strerror}" if isinstance(error, OSError) else "it is no text"


class TeamError(FairwayError):
    """The ranks of a team cannot continue together.

    Attributes:
        kind: what happened, such as ``Lost``, ``Late``, ``Diverged`` or ``Poisoned``.
        rank: the other rank that the error is about, if any.
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
    """A model cannot be described, partitioned or placed as requested."""


class CapacityError(PlacementError):
    """Devices have too little memory for what is placed on them."""
