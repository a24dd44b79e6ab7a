"""Decoding on a card: one token through a stack of sLSTM layers under a CUDA graph, and packed against dense training.

    python benchmarks/gpu_decode.py --out results.json [--peer FOLDER]

FOLDER holds another package that imports as ``pararnn`` and has the same functions; it is timed by the same code in a
process of its own. Times are medians of replays; the floor is reading the weights once at the copy bandwidth measured
in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys

import torch

LAYERS, WIDTH = 6, 512
BATCHES = (1, 64, 512)
HIDDEN = 3
DOCUMENTS, TOTAL, PACKED_WIDTH = 64, 131072, 256


def median_us(run, repeats: int = 200) -> float:
    """Median time of one call on the device, in microseconds."""
    for _ in range(20):
        run()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes per second of a large copy, read and written."""
    a = torch.empty(1 << 28, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.nbytes / (median_us(lambda: b.copy_(a), 20) * 1e-6)


def captured(run):
    """`run` as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


TOKENS = 8


def decode_us(batch: int, dtype: torch.dtype, fused: bool) -> float:
    """Microseconds a token through the stack; a graph of several tokens, from buffer to buffer and back."""
    from pararnn import ParaSLSTM, decode_step, decode_wx

    torch.manual_seed(0)
    cells = [make_cell(ParaSLSTM, dtype) for _ in range(LAYERS)]
    x = torch.randn(batch, WIDTH, device="cuda", dtype=dtype)
    states = [[torch.zeros(batch, 4, WIDTH, device="cuda", dtype=dtype) for _ in range(2)] for _ in cells]
    rows = 4 * WIDTH
    wide = torch.float32 if OURS else dtype
    wx = [torch.empty(batch, rows, device="cuda", dtype=wide) for _ in cells]

    @torch.no_grad()
    def tokens() -> None:
        for token in range(TOKENS):
            y = x
            for cell, buffers, projected in zip(cells, states, wx, strict=True):
                old, new = buffers[token % 2], buffers[1 - token % 2]
                if fused:
                    decode_step(cell, old, y, out=new)
                else:
                    decode_wx(cell, y, out=projected)
                    decode_step(cell, old, wx=projected, out=new)
                y = new[:, HIDDEN]

    graph = captured(tokens)
    us = median_us(graph.replay) / TOKENS
    assert torch.isfinite(states[-1][0]).all()
    return us


OURS = True


def make_cell(kind, dtype):
    """A cell on the card, of this package or of one whose cells are modules."""
    if OURS:
        return kind(WIDTH, WIDTH, device="cuda", dtype=dtype)
    return kind(WIDTH, WIDTH).to("cuda", dtype)


def decode_table(own: bool) -> dict[str, float]:
    """Microseconds a token by batch and dtype, the fastest way each package has."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        for batch in BATCHES:
            ways = {}
            for fused in (False, True) if own else (False,):
                try:
                    ways[fused] = decode_us(batch, dtype, fused)
                except Exception as error:
                    print(f"{dtype} {batch} fused={fused}: {type(error).__name__}: {error}", file=sys.stderr)
            key = f"{str(dtype).removeprefix('torch.')} {batch}"
            if own and True in ways:
                found[f"{key} one call"] = ways[True]
            print(key, ways, file=sys.stderr, flush=True)
            if ways:
                found[key] = ways[False] if False in ways else ways[True]
    return found


def packed_table() -> dict[str, float]:
    """Milliseconds of forward and backward over the same number of tokens, dense and packed."""
    from pararnn import ParaGRU, ParaLSTM, ParaSLSTM, newton_apply

    generator = torch.Generator().manual_seed(0)
    cuts = torch.sort(torch.randperm(TOTAL - 1, generator=generator)[: DOCUMENTS - 1] + 1).values
    offsets = [0, *cuts.tolist(), TOTAL]
    found = {}
    for kind in (ParaGRU, ParaLSTM, ParaSLSTM):
        cell = kind(PACKED_WIDTH, PACKED_WIDTH, seed=0, device="cuda", dtype=torch.float32)
        cell = cell.replace(**{n: a.requires_grad_() for n, a in cell.arrays.items()})

        def train(x, cell=cell, **told):
            states = newton_apply(cell, x, **told)
            torch.autograd.grad(states, [x, *cell.arrays.values()], torch.ones_like(states))

        row = torch.randn(1, TOTAL, PACKED_WIDTH, device="cuda").requires_grad_()
        batch = row.detach().reshape(DOCUMENTS, TOTAL // DOCUMENTS, PACKED_WIDTH).requires_grad_()
        name = kind.__name__
        found[f"{name} dense (64, 2048)"] = 1e-3 * median_us(lambda: train(batch), 15)  # noqa: B023
        found[f"{name} dense (1, 131072)"] = 1e-3 * median_us(lambda: train(row), 15)  # noqa: B023
        found[f"{name} packed, 64 documents"] = 1e-3 * median_us(lambda: train(row, cu_seqlens=offsets), 15)  # noqa: B023
        print(name, found, file=sys.stderr, flush=True)
    return found


def main() -> None:
    global OURS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="gpu_decode.json")
    parser.add_argument("--peer", help="folder of another package that imports as pararnn")
    parser.add_argument("--only", choices=("decode", "packed"), help="one of the two parts")
    parser.add_argument("--as-peer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_peer:
        OURS = False
        print(json.dumps(decode_table(False)))
        return
    bandwidth = copy_bandwidth()
    weights = LAYERS * (4 * WIDTH * WIDTH + 4 * WIDTH)
    result = {
        "device": torch.cuda.get_device_name(),
        "bandwidth": bandwidth,
        "floor_us": {n: 1e6 * weights * s / bandwidth for n, s in (("float32", 4), ("bfloat16", 2))},
        "ours": decode_table(True) if options.only != "packed" else {},
        "packed_ms": packed_table() if options.only != "decode" else {},
    }
    if options.peer and options.only != "packed":
        env = {**os.environ, "PYTHONPATH": options.peer}
        done = subprocess.run(
            [sys.executable, os.path.abspath(__file__), "--as-peer"],
            env=env, capture_output=True, text=True, cwd=options.peer, timeout=60,
        )  # fmt: skip
        sys.stderr.write(done.stderr[-4000:])
        result["peer"] = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else done.stderr[-400:]
    with open(options.out, "w") as file:
        json.dump(result, file, indent=2)
    print(f"{result['device']}, {bandwidth / 1e12:.2f} TB/s; floor {result['floor_us']} µs a token at batch 1")
    peers = result.get("peer", {})
    for name, us in result["ours"].items():
        other = peers.get(name.removesuffix(" one call")) if isinstance(peers, dict) else None
        print(f"{name:24} {us:9.2f} µs a token" + (f"   peer {other:9.2f}   {other / us:.2f}x" if other else ""))
    if isinstance(peers, str):
        print("peer:", peers)
    for name, ms in result["packed_ms"].items():
        print(f"{name:34} {ms:9.3f} ms")


if __name__ == "__main__":
    main()
