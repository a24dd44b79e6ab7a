"""Train torch's own nn.GRU on real data twice, as it is and parallelised: same losses, two wall clocks, one picture.

The task: handwritten digits (scikit-learn's bundled set, 1,797 images of 8×8) arrive row by row in one endless stream;
after the last row of each, say which digit it was. Training sees 768 of them as one sequence of 6,144 steps, in another
order at every step; the rest is the test.

    pip install 'pararnn[torch]' scikit-learn matplotlib tqdm
    python examples/stock_gru_task.py
"""

import argparse
import sys
import time

try:
    import matplotlib
    import numpy as np
    import torch
    from sklearn.datasets import load_digits
    from torch import nn
    from tqdm import tqdm
except ModuleNotFoundError as error:
    print(f"This example needs {error.name}: pip install 'pararnn[torch]' scikit-learn matplotlib tqdm")
    sys.exit(0)

from pararnn import parallelize

ROWS = 8


class Reader(nn.Module):
    """A stock GRU, and ten numbers after each digit's last row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rnn = nn.GRU(ROWS, width, batch_first=True)
        self.out = nn.Linear(width, 10)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        states, _ = self.rnn(stream)
        return self.out(states[:, ROWS - 1 :: ROWS])


def stream_of(images: torch.Tensor, device: str) -> torch.Tensor:
    """Images (N, 8, 8) as one sequence (1, 8·N, 8)."""
    return images.reshape(1, -1, ROWS).to(device)


def train(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, steps: int, device: str, title: str):
    """Loss and seconds of every step; the orders come from a seed of their own."""
    optimiser = torch.optim.Adam(model.parameters(), lr=5e-3)
    order = torch.Generator().manual_seed(1)
    losses, seconds = [], []
    for _ in tqdm(range(steps), desc=title, file=sys.stdout, mininterval=1.0):
        now = torch.randperm(len(images), generator=order)
        stream, wanted = stream_of(images[now], device), labels[now].to(device)
        begin = time.perf_counter()
        loss = nn.functional.cross_entropy(model(stream)[0], wanted)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())  # waits for the device
        seconds.append(time.perf_counter() - begin)
    return np.array(losses), np.array(seconds)


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, device: str) -> float:
    with torch.no_grad():
        found = model(stream_of(images, device))[0].argmax(dim=1).cpu()
    return float((found == labels).float().mean())


def picture(path: str, runs: dict) -> None:
    """Losses by step and by time, in one figure."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (by_step, by_time) = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    for (title, (losses, seconds)), style in zip(runs.items(), ("-", "--"), strict=True):
        by_step.plot(losses, style, label=title, linewidth=2)
        by_time.plot(np.cumsum(seconds), losses, style, label=title, linewidth=2)
    by_step.set(xlabel="step", ylabel="cross entropy", title="same losses")
    by_time.set(xlabel="seconds", title="less time")
    by_step.legend()
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--steps", type=int, default=40)
    options.add_argument("--digits", type=int, default=768, help="length of the training stream, eight steps each")
    options.add_argument("--width", type=int, default=64)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--out", default="stock_gru_task.svg")
    chosen = options.parse_args()

    # cuDNN's recurrent layers would round their products to ten bits otherwise.
    torch.backends.cudnn.allow_tf32 = False
    data = load_digits()
    # The data set is ordered by writer, so the test has hands that training has not seen.
    images = torch.from_numpy(data.images).float() / 16.0 - 0.5
    labels = torch.from_numpy(data.target).long()
    part = slice(0, chosen.digits)

    runs = {}
    for title, wrap in (("torch.nn.GRU", lambda model: model), ("parallelised", parallelize)):
        torch.manual_seed(0)
        model = wrap(Reader(chosen.width).to(chosen.device))
        runs[title] = train(model, images[part], labels[part], chosen.steps, chosen.device, f"{title:13}")
        score = accuracy(model, images[chosen.digits :], labels[chosen.digits :], chosen.device)
        print(f"{title:13} loss {runs[title][0][-1]:.6f}, {score:.1%} of new digits read")

    (theirs, slow), (ours, fast) = runs.values()
    print(f"every loss agrees: relative error {np.max(np.abs(ours - theirs) / theirs):.1e}")
    # The first step pays for set-up in both.
    print(f"median step: {np.median(slow[1:]):.3f} s and {np.median(fast[1:]):.3f} s,", end=" ")
    print(f"{np.median(slow[1:]) / np.median(fast[1:]):.1f} times faster on {chosen.device}")
    picture(chosen.out, runs)
    print(f"picture in {chosen.out}")


if __name__ == "__main__":
    main()
