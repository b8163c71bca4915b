"""Collectives: teams of ranks, planning and execution of steps, calibration of channels."""
