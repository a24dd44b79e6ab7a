"""The numerics contract as a suite that anyone can run on their backend.

::

    python -m pararnn_conformance numpy               # one backend
    python -m pararnn_conformance                     # every registered backend
    python -m pararnn_conformance --require-backend mine

A backend that is installed with an entry point in the group ``pararnn.backends`` is found by its name. Checks hand it
NumPy arrays, unless it has a method ``example_namespace()`` that returns the namespace in which it wants its arrays, or
a pair of namespace and device::

    class Mine(pararnn.Backend):
        name = "mine"

        def example_namespace(self):
            return torch, "cuda"

A problem that the backend's ``accepts`` refuses is counted as refused, with its sentence, and not as failed.
"""

from pararnn_conformance.expect import Refused, expect
from pararnn_conformance.registration import Instance, check, instances
from pararnn_conformance.runner import Outcome, failure_of, run, run_all
from pararnn_conformance.target import NotTested, Target

__all__ = [
    "Instance",
    "NotTested",
    "Outcome",
    "Refused",
    "Target",
    "check",
    "expect",
    "failure_of",
    "instances",
    "run",
    "run_all",
]
