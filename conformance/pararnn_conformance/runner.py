"""Runs the suite on targets and says how it went: one line per backend, then the totals."""

from __future__ import annotations

import logging
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tqdm import tqdm

from pararnn import NotConvergedWarning
from pararnn_conformance.expect import Refused
from pararnn_conformance.registration import Instance, instances
from pararnn_conformance.target import NotTested, Target

# Loose solves are part of the suite; their lines in the log are read by nobody.
logging.getLogger("pararnn").addHandler(logging.NullHandler())


@dataclass
class Outcome:
    """One backend's run; `absent` is the sentence that says why it was not tested."""

    name: str
    absent: str | None = None
    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)

    @property
    def line(self) -> str:
        if self.absent is not None:
            return f"{self.name:<10} NOT TESTED: {self.absent}"
        ran = len(self.passed) + len(self.failed)
        refused = sum(self.refused.values())
        tail = f", {refused} refused" if refused else ""
        return f"{self.name:<10} ran {ran} checks, {len(self.failed)} failed{tail}"


def failure_of(instance: Instance, target: Target) -> str | None:
    """Runs one instance: None, or why it failed. Refused passes through."""
    try:
        with warnings.catch_warnings():
            # Finite data must not raise these, and a solve that doubts its own result has to be expected to.
            warnings.simplefilter("error", RuntimeWarning)
            warnings.simplefilter("error", NotConvergedWarning)
            instance.run(target)
    except Refused:
        raise
    except AssertionError as error:
        return str(error)
    except Exception:
        return traceback.format_exc(limit=-4)
    return None


def run(name: str, *, only: str = "", quick: bool = False, progress: bool = True) -> Outcome:
    """Every check on one backend, named as in `Target`."""
    outcome = Outcome(name)
    try:
        target = Target(name)
    except NotTested as error:
        outcome.absent = str(error)
        return outcome
    chosen = instances(only=only, quick=quick)
    # disable=None draws the progress line on a terminal only.
    for instance in tqdm(chosen, desc=name, unit="check", disable=None if progress else True):
        try:
            failure = failure_of(instance, target)
        except Refused as error:
            outcome.refused[str(error)] += 1
            continue
        if failure is None:
            outcome.passed.append(instance.name)
        else:
            outcome.failed[instance.name] = failure
    return outcome


def run_all(names: Sequence[str], required: Sequence[str], *, only: str = "", quick: bool = False) -> int:
    """Runs, prints and returns the exit code: 1 for a failed check, or a required backend that was not tested."""
    outcomes = []
    for name in names:
        outcome = run(name, only=only, quick=quick)
        for check, why in outcome.failed.items():
            print(f"FAILED {name} {check}\n    " + why.strip().replace("\n", "\n    "))
        outcomes.append(outcome)
    print()
    for outcome in outcomes:
        print(outcome.line)
        for sentence, count in outcome.refused.most_common():
            print(f"{'':<10} {count} refused: {sentence}")
    missing = [o.name for o in outcomes if o.name in required and not o.passed and not o.failed]
    for name in missing:
        print(f"{name} is required and was not tested")
    failed = sum(len(o.failed) for o in outcomes)
    print(f"{sum(len(o.passed) for o in outcomes)} passed, {failed} failed")
    sys.stdout.flush()
    return 1 if failed or missing else 0
