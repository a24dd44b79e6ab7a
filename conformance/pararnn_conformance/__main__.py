"""The command line: ``python -m pararnn_conformance [NAME ...]``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pararnn import backends
from pararnn_conformance.registration import instances
from pararnn_conformance.runner import run_all


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="pararnn_conformance", description="Does a backend keep pararnn's contract?")
    parser.add_argument(
        "names", nargs="*", metavar="NAME",
        help="backends to test, all registered ones by default; NAME@MODULE gives it arrays of another library, "
        "as in array@torch or array@jax.numpy",
    )  # fmt: skip
    parser.add_argument(
        "--require-backend", nargs="+", action="extend", default=[], metavar="NAME",
        help="test these too, and fail if one cannot be tested",
    )  # fmt: skip
    parser.add_argument("--only", default="", metavar="PATTERN", help="only checks whose name contains PATTERN")
    parser.add_argument("--quick", action="store_true", help="the short suite, for libraries that run op by op")
    parser.add_argument("--list", action="store_true", help="list the checks and what they show, and run nothing")
    chosen = parser.parse_args(arguments)
    found = instances(only=chosen.only, quick=chosen.quick)
    if not found:
        parser.error(f"no check's name contains {chosen.only!r}")
    if chosen.list:
        for instance in found:
            print(f"{instance.name:<60} {instance.shows:<20} {instance.idea}")
        print(f"{len(found)} checks")
        return 0
    known = backends()
    for name in chosen.names:
        if name.partition("@")[0] not in known:
            parser.error(f"no backend is called {name!r}; there are {', '.join(known)}")
    names = list(dict.fromkeys([*(chosen.names or known), *chosen.require_backend]))
    return run_all(names, chosen.require_backend, only=chosen.only, quick=chosen.quick)


if __name__ == "__main__":
    sys.exit(main())
