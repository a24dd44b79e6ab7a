"""Stock nn.GRU and nn.LSTM in parallel over time against cuDNN, in fp32: `python benchmarks/gpu_stock_rnn.py`.

One run prints, behind an agreement gate, the time of a forward pass and of forward and backward: cuDNN's, the time
loop in captured fused steps (what a compiler makes of the loop at best), and ours. `--weights trained` first trains a
byte model on the standard library's sources and runs that network on its text. `--tune` tries segment lengths.
Saves results/gpu_stock_rnn_<weights>.json.
"""

from __future__ import annotations

import argparse
import os
import sys
import time as clock
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from timing import header, save

import pararnn
from pararnn import NewtonConfig, NewtonStats, StockGRU, StockLSTM

SHAPES = ((8, 2048, 256), (1, 16384, 256), (1, 60000, 256), (1, 131072, 1024))
# Bars of the forward pass and of forward with backward, as multiples of cuDNN's time.
BARS = {
    "fresh": {SHAPES[0]: (25, 15), SHAPES[1]: (150, 80), SHAPES[2]: (250, 150)},
    "trained": {SHAPES[0]: (10, 6), SHAPES[1]: (45, 25), SHAPES[2]: (90, 50)},
}
KINDS = {"gru": (nn.GRU, StockGRU), "lstm": (nn.LSTM, StockLSTM)}
NAMES = {"W_x.weight": "weight_ih_l0", "W_x.bias": "bias_ih_l0", "R": "weight_hh_l0", "b_h": "bias_hh_l0"}
DEVICE = "cuda"
# cuDNN refuses longer sequences.
LONGEST = 65_535


def milliseconds(run: Callable[[], object], budget_s: float = 0.6) -> float:
    """Median time of a call on the device, host work included."""
    run()
    torch.cuda.synchronize()
    times: list[float] = []
    begun = clock.perf_counter()
    while len(times) < 3 or (clock.perf_counter() - begun < budget_s and len(times) < 30):
        begin = clock.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(1e3 * (clock.perf_counter() - begin))
    return sorted(times)[len(times) // 2]


def stdlib_bytes(count: int) -> torch.Tensor:
    """The standard library's sources as bytes."""
    root, text = Path(os.__file__).parent, b""
    for path in sorted(root.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= count:
            break
    return torch.frombuffer(bytearray(text[:count]), dtype=torch.uint8).long()


class ByteModel(nn.Module):
    """Embedding, one stock layer, logits."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.rnn = KINDS[kind][0](width, width, batch_first=True)
        self.head = nn.Linear(width, 256)


def trained(kind: str, width: int, steps: int, rate: float) -> ByteModel:
    """The model after `steps` steps of Adam on windows of 256 bytes."""
    torch.manual_seed(0)
    model = ByteModel(kind, width).to(DEVICE)
    if kind == "lstm":
        with torch.no_grad():
            model.rnn.bias_ih_l0[width : 2 * width] += 1.0
    text = stdlib_bytes(2_000_000).to(DEVICE)
    optimiser = torch.optim.Adam(model.parameters(), rate)
    loss = torch.zeros(())
    for _ in range(steps):
        at = torch.randint(len(text) - 257, (64, 1), device=DEVICE) + torch.arange(257, device=DEVICE)
        batch = text[at]
        logits = model.head(model.rnn(model.embedding(batch[:, :-1]))[0])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    print(f"trained {kind} ({width}): {steps} steps at {rate}, loss {float(loss.detach()):.2f} nats a byte")
    return model


def cell_of(kind: str, module: nn.Module) -> pararnn.MixingCell:
    width = module.hidden_size
    cell = KINDS[kind][1](module.input_size, width, xp=torch, device=DEVICE, seed=0)
    return cell.replace(**{ours: getattr(module, theirs) for ours, theirs in NAMES.items()})


def hidden(cell, states: torch.Tensor) -> torch.Tensor:
    return states if cell.state_slots == 1 else states[:, :, cell.hidden_slot]


def measure(kind: str, module: nn.Module, x: torch.Tensor, config: NewtonConfig, budget_s: float) -> dict:
    """Times and agreement of one network on one input."""
    batch, time, width = x.shape
    cell, stats = cell_of(kind, module), NewtonStats()
    plain = cell.replace(**{name: a.detach() for name, a in cell.arrays.items()})
    loop = NewtonConfig(segment_len=time)
    cotangent = torch.randn(batch, time, width, device=DEVICE)
    short = time <= LONGEST
    row: dict = {"kind": kind, "shape": [batch, time, width]}
    with torch.no_grad():
        ours = hidden(cell, pararnn.newton_apply(plain, x, config, stats=stats))
        walked = hidden(cell, pararnn.newton_apply(plain, x, loop))
        theirs = module(x)[0] if short else walked
        row["error"] = float((ours - theirs).abs().max() / theirs.abs().max())
        row["forward_ms"] = milliseconds(lambda: pararnn.newton_apply(plain, x, config), budget_s)
        row["loop_ms"] = milliseconds(lambda: pararnn.newton_apply(plain, x, loop), budget_s / 2)
        row["cudnn_ms"] = milliseconds(lambda: module(x), budget_s) if short else None
    row.update(
        passes=stats.passes, path=stats.path, segment_len=stats.segment_len, estimate=stats.agreement_estimate,
        history=[float(f"{v:.1e}") for v in stats.residual_history], backend=stats.scan_backend, reason=stats.reason,
    )  # fmt: skip
    watched = x.clone().requires_grad_()

    def both(apply: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        watched.grad = None
        module.zero_grad(set_to_none=True)
        apply(watched).backward(cotangent)
        return [watched.grad, *(p.grad for p in module.parameters())]

    def by_us(v: torch.Tensor) -> torch.Tensor:
        return hidden(cell, pararnn.newton_apply(cell, v, config))

    if width <= 256:
        grads = both(by_us)
        if short:
            wanted = both(lambda v: module(v)[0])
            row["grad_error"] = max(
                float((a - b).abs().max() / b.abs().max()) for a, b in zip(grads, wanted, strict=True)
            )
            row["cudnn_both_ms"] = milliseconds(lambda: both(lambda v: module(v)[0]), budget_s)
        row["both_ms"] = milliseconds(lambda: both(by_us), budget_s)
    return row


def line(row: dict, weights: str) -> str:
    def number(name: str) -> str:
        return f"{row[name]:9.3f}" if row.get(name) is not None else "        –"

    def ratio(slow: str, fast: str) -> str:
        return f"{row[slow] / row[fast]:6.1f}x" if row.get(slow) and row.get(fast) else "      –"

    bars = BARS[weights].get(tuple(row["shape"]), ("–", "–"))
    agreed = row["error"] <= 1e-4 and row.get("grad_error", 0.0) <= 1e-3
    return (
        f"{row['kind']:4s} {row['shape']!s:18s} {'ok ' if agreed else 'BAD'} err {row['error']:.0e}/"
        f"{row.get('grad_error', float('nan')):.0e} L{row['segment_len']:4d} {row['path'][:4]} {row['passes']} passes |"
        f" fwd {number('forward_ms')} loop {number('loop_ms')} cuDNN {number('cudnn_ms')}"
        f" {ratio('cudnn_ms', 'forward_ms')} (bar {bars[0]}) |"
        f" both {number('both_ms')} cuDNN {number('cudnn_both_ms')} {ratio('cudnn_both_ms', 'both_ms')} (bar {bars[1]})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", choices=("fresh", "trained"), default="fresh")
    parser.add_argument("--kinds", nargs="+", choices=tuple(KINDS), default=list(KINDS))
    parser.add_argument("--shapes", type=int, nargs="+", default=list(range(len(SHAPES))), help="which of SHAPES")
    parser.add_argument("--steps", type=int, default=600, help="training steps")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--tune", type=int, nargs="+", default=None, metavar="L", help="segment lengths to try")
    parser.add_argument("--warmup", type=int, default=None)
    parser.add_argument("--budget", type=float, default=0.6)
    options = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    rows = []
    for kind in options.kinds:
        model = trained(kind, 256, options.steps, options.rate) if options.weights == "trained" else None
        for shape in (SHAPES[k] for k in options.shapes):
            batch, time, width = shape
            torch.manual_seed(1)
            if model is not None:
                if width != 256:
                    continue
                text = stdlib_bytes(2_000_000)[-batch * time :].view(batch, time).to(DEVICE)
                module, x = model.rnn, model.embedding(text).detach()
            else:
                module = KINDS[kind][0](width, width, batch_first=True).to(DEVICE)
                x = torch.randn(shape, device=DEVICE)
            for length in options.tune or [None]:
                config = NewtonConfig(segment_len=length, warmup=options.warmup)
                row = measure(kind, module, x, config, options.budget)
                rows.append(row)
                print(line(row, options.weights), row["history"], flush=True)
    save(f"gpu_stock_rnn_{options.weights}", header(card=torch.cuda.get_device_name()), rows)


if __name__ == "__main__":
    main()
