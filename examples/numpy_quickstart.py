"""A GRU over 20,000 steps in parallel, checked against the time loop, and its gradient; NumPy only."""

import numpy as np

from pararnn import NewtonStats, ParaGRU, newton_apply, newton_vjp, verify_agreement

cell = ParaGRU(input_size=16, hidden_size=32, seed=0)
x = np.random.default_rng(0).standard_normal((1, 20_000, 16), dtype=np.float32)  # (batch, time, features)

stats = NewtonStats()
states = newton_apply(cell, x, stats=stats)  # (batch, time, channels), all steps at once
print(states.shape, f"{stats.path} on {stats.scan_backend}, {stats.passes} passes, converged: {stats.converged}")
print(verify_agreement(cell, x))  # runs both ways and compares

states, pullback = newton_vjp(cell, x)
gradients = pullback(states)  # of 0.5 * sum(states ** 2)
print({name: array.shape for name, array in gradients.params.items()})
