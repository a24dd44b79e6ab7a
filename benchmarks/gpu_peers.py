"""Other people's GRU kernels at the shapes of gpu_channelwise.py: `python gpu_peers.py LIBRARY PATH B,T,D …`.

`torch` is the package pararnn-torch, PATH the folder to import it from; `apple` is a build of ml-pararnn's CUDA parts,
PATH its library file. Both are called with the gate inputs given, in the layout that each wants, so nothing is
converted while the clock runs. A process of its own, because all of them are imported by one name. Prints one line of
JSON: for each shape milliseconds under graph replay and of a plain call, and where the equations are ours the largest
error against float64 over the first steps.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from gpu_timing import called_ms, replayed_ms

STEPS = 256


def inputs(batch: int, time: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers of gpu_channelwise.problem: weights (3, D), then gate inputs (B, T, 3, D)."""
    torch.manual_seed(0)
    return 0.5 * torch.randn(3, width, device="cuda"), torch.randn(batch, time, 3, width, device="cuda")


def loop(weights: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """The diagonal GRU's first steps in float64."""
    (a_z, a_r, a_n), wide = weights.double(), gates[:, :STEPS].double()
    h, states = torch.zeros_like(wide[:, 0, 0]), []
    for z, r, n in (step.unbind(1) for step in wide.unbind(1)):
        z, r = torch.sigmoid(a_z * h + z), torch.sigmoid(a_r * h + r)
        h = (1.0 - z) * h + z * torch.tanh(a_n * (r * h) + n)
        states.append(h)
    return torch.stack(states, 1)


def pararnn_torch(weights: torch.Tensor, gates: torch.Tensor):
    import pararnn.kernels  # noqa: F401

    fused = torch.ops.pararnn.newton_gru_fused
    flat, rows = gates.flatten(2), weights.unbind(0)
    return lambda: fused(flat, *rows, None, None, None, max_iters=3, omega=1.0)


def apple(weights: torch.Tensor, gates: torch.Tensor):
    fused = torch.ops.parallel_reduce_cuda.fused_fwd_gru_diag_mh
    by_channel, turned = weights.T.contiguous(), gates.permute(0, 3, 1, 2).contiguous()
    return lambda: fused(by_channel, turned)


def main() -> None:
    library, path, *shapes = sys.argv[1:]
    if library == "apple":
        torch.ops.load_library(path)
    else:
        sys.path.insert(0, path)
    found = []
    for shape in shapes:
        weights, gates = inputs(*map(int, shape.split(",")))
        row: dict[str, object] = {"shape": shape}
        try:
            run = {"torch": pararnn_torch, "apple": apple}[library](weights, gates)
            states = run()
            row["call_ms"], row["host_us"] = called_ms(run, 10)
            row["ms"] = row["call_ms"]
            if library == "torch":
                row["error"] = float((states[:, :STEPS] - loop(weights, gates)).abs().max())
            row["ms"] = replayed_ms(run, 10)
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        found.append(row)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
