"""Ranks of a run in one process, on a network whose order a seed decides."""
