"""``fairway.program``: traces Python that calls many jitted functions into one program."""

from fairway.tracing.stages import Compiled, Lowered, Wrapped, program

__all__ = ["Compiled", "Lowered", "Wrapped", "program"]
