"""Decoding under a CUDA graph: buffers that stay where they are, one replay a token, nothing allocated."""

import torch

from pararnn import ParaSLSTM, decode_step, decode_wx, sequential_apply

LAYERS, WIDTH, BATCH = 4, 256, 8


@torch.no_grad()
def main() -> None:
    if not torch.cuda.is_available():
        print("this example needs a CUDA card")
        return
    cells = [ParaSLSTM(WIDTH, WIDTH, seed=k, device="cuda", dtype=torch.float32) for k in range(LAYERS)]
    x = torch.zeros(BATCH, WIDTH, device="cuda")
    states = [torch.zeros(BATCH, *cell.state_shape, device="cuda") for cell in cells]
    projected = [torch.empty(BATCH, len(cell.gates) * WIDTH, device="cuda") for cell in cells]

    def token() -> torch.Tensor:
        y = x
        for cell, state, wx in zip(cells, states, projected, strict=True):
            decode_wx(cell, y, out=wx)
            decode_step(cell, state, wx=wx, out=state)
            y = state[:, cell.hidden_slot]
        return y

    # Once before capturing, on a stream of its own, so that kernels are compiled.
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        token()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = token()
    for state in states:
        state.zero_()

    inputs = torch.randn(50, BATCH, WIDTH, device="cuda")
    for step in inputs:
        x.copy_(step)
        graph.replay()

    y = inputs.transpose(0, 1)
    for cell in cells:
        y = sequential_apply(cell, y)[:, :, cell.hidden_slot]
    print("largest difference from the time loop:", float((out - y[:, -1]).abs().max()))


if __name__ == "__main__":
    main()
