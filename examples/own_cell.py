"""A cell of your own: write one step, and the parallel run, its check and its gradient follow."""

import numpy as np

from pararnn import ChannelwiseCell, check_cell, newton_vjp, sequential_apply, verify_agreement


class MinimalGatedUnit(ChannelwiseCell):
    """One gate that both resets and updates: f = σ(a_f h + f_x), h' = (1 - f) h + f tanh(a_n f h + n_x)."""

    slots = ("h",)
    gates = ("f", "n")
    params = ("a_f", "a_n")

    def step(self, xp, h, f, n, a_f, a_n):
        f = 1.0 / (1.0 + xp.exp(-(a_f * h + f)))
        return ((1.0 - f) * h + f * xp.tanh(a_n * (f * h) + n),)


def main() -> None:
    cell = MinimalGatedUnit(8, 16, dtype=np.float64, seed=0)
    check_cell(cell)  # says what is wrong with a step that cannot be solved
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3000, 8))
    print(verify_agreement(cell, x))

    # The gradient of sum(w * states) by a_n, against moving a_n a little both ways.
    states, pullback = newton_vjp(cell, x)
    w = rng.standard_normal(states.shape)
    gradient = pullback(w).params["a_n"]
    way = rng.standard_normal(16)
    ends = [np.sum(w * sequential_apply(cell.replace(a_n=cell.a_n + s * way), x)) for s in (1e-5, -1e-5)]
    print(f"derivative {gradient @ way:.8f}, by finite differences {(ends[0] - ends[1]) / 2e-5:.8f}")


if __name__ == "__main__":
    main()
