"""Collectives of ranks: teams, steps that are planned and kept to, channels that are measured."""
