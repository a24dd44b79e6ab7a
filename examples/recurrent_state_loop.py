"""Rollouts of a recurrent policy: states go from one to the next, episodes begin anywhere, learning is parallel."""

import torch

from pararnn import ParaGRU, ParaRNN

ENVS, STEPS, FEATURES, WIDTH = 4, 64, 6, 32


def main() -> None:
    torch.manual_seed(0)
    rnn = ParaRNN(ParaGRU(FEATURES, WIDTH, seed=0), return_hidden=True)
    head = torch.nn.Linear(WIDTH, 1)
    optimizer = torch.optim.Adam([*rnn.parameters(), *head.parameters()], 1e-2)

    state, begins = torch.zeros(ENVS, WIDTH), torch.ones(ENVS, dtype=torch.bool)
    for rollout in range(100):
        # Acting: a step at a time. Where an episode begins the state is zero.
        start, observed, reset = state, [], []
        rnn.eval()
        with torch.no_grad():
            for _ in range(STEPS):
                observed.append(torch.randn(ENVS, 1, FEATURES))
                reset.append(begins)
                _, state = rnn(observed[-1], state, reset=begins[:, None])
                begins = torch.rand(ENVS) < 0.05
        x, resets = torch.cat(observed, dim=1), torch.stack(reset, dim=1)

        # Learning: the whole rollout in parallel, from the state it began with, the episodes kept apart. The task is to
        # recall what was seen the step before.
        rnn.train()
        h, last = rnn(x, start, reset=resets)
        error = (head(h[:, 1:])[..., 0] - x[:, :-1, 0]).square().mean()
        optimizer.zero_grad()
        error.backward()
        apart = float((last.detach() - state).abs().max())
        optimizer.step()
        if rollout % 20 == 19:
            print(f"rollout {rollout + 1}: error {error.item():.3f}, acting and learning differ by {apart:.1e}")


if __name__ == "__main__":
    main()
