"""Scenarios: how many users there are at each moment."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Scenario:
    """One load shape.

    Attributes:
        seconds: how long it lasts unless --run-time says otherwise.
        users: share of the peak (--users) at a moment, given as a share of the duration in [0, 1).
        about: for the help text.
    """

    seconds: float
    users: Callable[[float], float]
    about: str


def _ramp(moment: float) -> float:
    """Ten steps to the peak, each long enough to read a throughput from it."""
    return (int(moment * 10) + 1) / 10


def _spike(moment: float) -> float:
    """A tenth of the peak, five times the load at once, and back: does it recover?"""
    return 1.0 if 0.4 <= moment < 0.6 else 0.1


SCENARIOS = {
    "steady": Scenario(60, lambda _: 1.0, "the same load all the time"),
    "ramp": Scenario(120, _ramp, "ten steps to saturation; the report names the throughput of each"),
    "spike": Scenario(90, _spike, "a tenth of the load, the whole of it at once, and back"),
    "soak": Scenario(1800, lambda _: 1.0, "steady for half an hour, for leaks"),
    "rollout": Scenario(300, lambda _: 1.0, "steady while versions are published and rolled back (loadtest/run.py)"),
}
