"""What every benchmark shares: repeated timing, the machine's description, and results saved beside the script."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def best_of(run: Callable[[], Any], *, budget_s: float = 2.0, least: int = 3, most: int = 30) -> dict[str, float]:
    """Seconds per call: the minimum and the median over as many calls as fit the budget."""
    begin = time.perf_counter()
    run()
    # A call that takes many seconds is its own warm-up.
    times: list[float] = [time.perf_counter() - begin]
    if times[0] < budget_s:
        times.clear()
    else:
        least = min(least, 2)
    while len(times) < least or (sum(times) < budget_s and len(times) < most):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return {"min": min(times), "median": statistics.median(times), "calls": len(times)}


def processor() -> str:
    """The processor's name, as far as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def commit() -> str:
    """The commit that is measured, marked if the tree has changes."""
    root = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--", "..") else "")


def header(**extra: Any) -> dict[str, Any]:
    import numpy as np

    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        **extra,
    }


def save(name: str, head: dict[str, Any], rows: list[dict[str, Any]]) -> Path:
    """Writes results/NAME.json and returns its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"run": head, "rows": rows}, indent=1) + "\n")
    return path
