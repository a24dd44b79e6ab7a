"""The command `pararnn`: the demo, and short answers about one problem on this machine."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

import pararnn
from pararnn.cells import ChannelwiseCell
from pararnn.config import NewtonConfig
from pararnn.demo import DemoError, run_both_ways
from pararnn.demo.model import CELLS
from pararnn.demo.run import run
from pararnn.demo.settings import make_settings
from pararnn.drives import with_drives
from pararnn.errors import NewtonDivergenceError, NotConvergedWarning
from pararnn.problem import make_problem
from pararnn.registry import choose

# NumPy has no bfloat16.
DTYPES = ("float32", "float64", "float16")

CELL_HELP = f"one of {', '.join(CELLS)} (default: gru)"

OK, NOT_OK, USAGE, INTERRUPTED = 0, 1, 2, 130


class UsageError(Exception):
    """What was asked for cannot be done; the message says why and what would work."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns 0, or 1 for a run that does not agree, 2 for options that do not fit."""
    for stream in (sys.stdout, sys.stderr):
        # Text that a narrow terminal encoding cannot show must not end a run.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    options = _parser().parse_args(arguments)
    try:
        code = options.handler(options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader, `head` perhaps, has seen enough; what is still buffered goes nowhere, also when Python closes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOT_OK
    except UsageError as error:
        print(f"pararnn {options.command}: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print(f"pararnn {options.command}: stopped", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pararnn", description="Nonlinear recurrent networks, parallel over time.")
    parser.add_argument("--version", action="version", version=f"pararnn {pararnn.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    text = "real text both ways with the speed of each, then a byte model trained in parallel over time"
    demo = commands.add_parser("demo", help=text, description=f"Runs {text}.")
    demo.add_argument("--file", help="text to learn (default: the sources of Python's standard library)")
    demo.add_argument("--steps", type=_at_least(1), metavar="N", help="training steps (default: 300)")
    demo.add_argument("--length", type=_at_least(1), metavar="T", help="steps of the timed sequence (default: 65536)")
    demo.add_argument("--out", metavar="DIR", help="folder for model, numbers and plot (default: pararnn-demo)")
    demo.add_argument("--backend", metavar="NAME", help="a backend from `pararnn backends` (default: auto)")
    demo.add_argument("--cell", choices=CELLS, metavar="CELL", help=CELL_HELP)
    demo.add_argument("--seed", type=_at_least(0), metavar="N", help="of weights, windows and sample (default: 0)")
    demo.add_argument("--quick", action="store_true", help="a small model for a few steps: seconds")
    demo.set_defaults(handler=_demo)

    text = "which backend and path would run a problem, why, and the memory that it takes"
    explain = commands.add_parser("explain", help=text, description=f"Says {text}.")
    _add_problem(explain, time=16384)
    explain.set_defaults(handler=_explain)

    text = "random input both ways: how far the parallel run is from the time loop"
    verify = commands.add_parser("verify", help=text, description=f"Runs {text}. Exit code 1 if they do not agree.")
    _add_problem(verify, time=4096)
    verify.add_argument("--seed", type=_at_least(0), default=0, metavar="N", help="of weights and input (default: 0)")
    verify.add_argument("--iters", type=_at_least(0), metavar="K", help="pin K Newton iterations, one unknown per step")
    verify.add_argument("--atol", type=_tolerance, help="allowed relative error (default: 1e-4 in float32)")
    verify.add_argument("--json", action="store_true", help="print one JSON object")
    verify.set_defaults(handler=_verify)

    text = "every known backend, in the order in which auto asks them, and whether it can run here"
    known = commands.add_parser("backends", help=text, description=f"Lists {text}.")
    known.set_defaults(handler=_backends)
    return parser


def _add_problem(parser: argparse.ArgumentParser, *, time: int) -> None:
    parser.add_argument("--cell", choices=CELLS, metavar="CELL", default="gru", help=CELL_HELP)
    parser.add_argument("--batch", type=_at_least(1), default=1, metavar="B", help="sequences (default: 1)")
    parser.add_argument("--time", type=_at_least(1), default=time, metavar="T", help=f"time steps (default: {time})")
    parser.add_argument("--width", type=_at_least(1), default=64, metavar="D", help="state channels (default: 64)")
    parser.add_argument("--features", type=_at_least(1), metavar="I", help="input features (default: the width)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default: float32")
    parser.add_argument("--backend", default="auto", metavar="NAME", help="see `pararnn backends` (default: auto)")
    parser.add_argument("--segment-len", type=_at_least(1), metavar="L", help="steps of a segment (default: chosen)")


def _at_least(least: int) -> Any:
    def whole(text: str) -> int:
        try:
            value = int(text.replace("_", "").replace(",", ""))
        except ValueError:
            raise argparse.ArgumentTypeError(f"wanted a whole number, got {text!r}") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"wanted at least {least}, got {value}")
        return value

    return whole


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"wanted a number of at least 0, got {text!r}")
    return value


def _problem(options: argparse.Namespace, seed: int | None) -> tuple[ChannelwiseCell, np.ndarray, NewtonConfig]:
    """Cell, input and config of `explain` and `verify`; input of zeros where no seed is given."""
    features = options.features or options.width
    dtype = getattr(np, options.dtype)
    shape = (options.batch, options.time, features)
    cell = CELLS[options.cell](features, options.width, dtype=dtype, seed=seed or 0)
    if seed is None:
        # Nothing is computed, so one number seen through every index stands for an input of any size.
        x = np.broadcast_to(np.zeros((), dtype=dtype), shape)
    else:
        x = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32).astype(dtype, copy=False)
    try:
        config = NewtonConfig(
            scan_backend=options.backend, segment_len=options.segment_len, max_iters=getattr(options, "iters", None)
        )
        choose(make_problem(options.command, *with_drives(options.command, cell, x, {}), None, config))
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(str(error)) from None
    return cell, x, config


def _demo(options: argparse.Namespace) -> int:
    names = ("file", "steps", "length", "out", "backend", "cell", "seed")
    chosen = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    try:
        result = run(make_settings(quick=options.quick, **chosen))
    except DemoError as error:
        raise UsageError(str(error)) from None
    return OK if result.fresh.report.ok and result.trained.report.ok else NOT_OK


def _explain(options: argparse.Namespace) -> int:
    cell, x, config = _problem(options, seed=None)
    print(pararnn.explain(cell, x, config))
    return OK


def _verify(options: argparse.Namespace) -> int:
    cell, x, config = _problem(options, options.seed)
    try:
        with warnings.catch_warnings():
            # The account below says it too, and says it once.
            warnings.simplefilter("ignore", NotConvergedWarning)
            both = run_both_ways(cell, x, config, atol=options.atol)
    except NewtonDivergenceError as error:
        print(f"pararnn verify: {error}", file=sys.stderr)
        return NOT_OK
    stats = both.stats
    if options.json:
        found = {
            "report": both.report.to_dict(),
            "stats": {**stats.to_dict(), "lyapunov": stats.lyapunov},
            "loop_seconds": both.loop_s,
            "parallel_seconds": both.parallel_s,
        }
        print(json.dumps(_plain(found), indent=1, allow_nan=False))
    else:
        print(both.report)
        for line in both.speed():
            print(line)
        for name, value in {**stats.to_dict(), "lyapunov": stats.lyapunov}.items():
            print(f"{name:18} {_short(value)}")
    return OK if both.report.ok else NOT_OK


def _short(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(_short(item) for item in value) or "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _plain(value: Any) -> Any:
    """The same value in what JSON has: it knows neither infinity nor NaN."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _backends(options: argparse.Namespace) -> int:
    known = pararnn.backends()
    widest = max(len(name) for name in known)
    for name, backend in known.items():
        sentence = backend if isinstance(backend, str) else backend.probe()
        print(f"{name:{widest}}  {'can run' if sentence is None else 'cannot run: ' + sentence}")
    return OK


if __name__ == "__main__":
    sys.exit(main())
