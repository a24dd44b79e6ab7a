"""StockCfC: the published equations, the package `ncps`, uneven steps, gradients, and every way to run it."""

from __future__ import annotations

import numpy as np
import pytest

from pararnn import NewtonConfig, NewtonStats, StockCfC, newton_apply, newton_vjp, sequential_apply, verify_agreement
from support import error_of

KINDS = [(mode, layers) for mode in ("default", "pure", "no_gate") for layers in (0, 1, 2)]
ACTIVATIONS = {
    "lecun_tanh": lambda u: 1.7159 * np.tanh(0.666 * u),
    "tanh": np.tanh,
    "silu": lambda u: u / (1.0 + np.exp(-u)),
    "relu": lambda u: np.maximum(u, 0.0),
}


def made(mode, layers, *, activation="lecun_tanh", dtype=np.float64, time=90):
    rng = np.random.default_rng(3)
    cell = StockCfC(3, 6, mode=mode, backbone_layers=layers, backbone_activation=activation, seed=0, dtype=dtype)
    if mode == "pure":
        cell = cell.replace(w_tau=(0.3 * rng.standard_normal(6)).astype(dtype), A=rng.standard_normal(6).astype(dtype))
    x = rng.standard_normal((2, time, 3)).astype(dtype)
    return cell, x, rng.exponential(1.0, (2, time)).astype(dtype)


def by_hand(cell, x, dt):
    a, phi = cell.arrays, ACTIVATIONS[cell.backbone_activation]
    h, out = np.zeros((x.shape[0], cell.d_h)), []
    for t in range(x.shape[1]):
        made = x[:, t] @ a["W_x.weight"].T + a["W_x.bias"] + h @ a["R"].T
        for k in range(1, cell.backbone_layers):
            made = phi(made) @ a[f"R_{k}"].T + a[f"b_{k}"]
        if cell.backbone_layers:
            made = phi(made) @ a["R_out"].T + a["b_out"]
        ts = dt[:, t, None]
        if cell.mode == "pure":
            h = a["A"] - a["A"] * np.exp(-ts * (np.abs(a["w_tau"]) + np.abs(made))) * made
        else:
            ff1, ff2, t_a, t_b = np.split(made, 4, axis=1)
            gate = 1.0 / (1.0 + np.exp(-(t_a * ts + t_b)))
            h = (1.0 if cell.mode == "no_gate" else 1.0 - gate) * np.tanh(ff1) + gate * np.tanh(ff2)
        out.append(h)
    return np.stack(out, axis=1)


@pytest.mark.parametrize(("mode", "layers"), KINDS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_published_equations(mode, layers, activation):
    cell, x, dt = made(mode, layers, activation=activation)
    wanted = by_hand(cell, x, dt)
    np.testing.assert_allclose(sequential_apply(cell, x, dt=dt), wanted, rtol=1e-11, atol=1e-13)
    stats = NewtonStats()
    assert error_of(cell, newton_apply(cell, x, NewtonConfig(segment_len=16), dt=dt, stats=stats), wanted) < 1e-10
    assert stats.converged


@pytest.mark.parametrize(("mode", "layers"), KINDS)
def test_it_is_the_cell_of_ncps(mode, layers):
    torch = pytest.importorskip("torch")
    package = pytest.importorskip("ncps.torch")
    torch.manual_seed(0)
    theirs = package.CfCCell(3, 6, mode=mode, backbone_units=6, backbone_layers=layers).double()
    for p in theirs.parameters():
        p.data += 0.1 * torch.randn_like(p)
    cell, x, dt = made(mode, layers)
    heads = [theirs.ff1] if mode == "pure" else [theirs.ff1, theirs.ff2, theirs.time_a, theirs.time_b]
    weight = np.concatenate([head.weight.detach().numpy() for head in heads])
    bias = np.concatenate([head.bias.detach().numpy() for head in heads])
    inner = [m for m in theirs.backbone or [] if isinstance(m, torch.nn.Linear)]
    arrays = {"R_out": weight, "b_out": bias} if layers else {}
    for k, layer in enumerate(inner[1:], start=1):
        arrays |= {f"R_{k}": layer.weight.detach().numpy(), f"b_{k}": layer.bias.detach().numpy()}
    if layers:
        weight, bias = inner[0].weight.detach().numpy(), inner[0].bias.detach().numpy()
    arrays |= {"W_x.weight": weight[:, :3].copy(), "R": weight[:, 3:].copy(), "W_x.bias": bias}
    if mode == "pure":
        arrays |= {"w_tau": theirs.w_tau.detach().numpy()[0], "A": theirs.A.detach().numpy()[0]}
    cell = cell.replace(**arrays)
    h, wanted = torch.zeros(2, 6, dtype=torch.float64), []
    with torch.no_grad():
        for t in range(x.shape[1]):
            h, _ = theirs(torch.from_numpy(x[:, t]), h, torch.from_numpy(dt[:, t, None]))
            wanted.append(h.numpy())
    got = newton_apply(cell, x, NewtonConfig(segment_len=16), dt=dt)
    assert error_of(cell, got, np.stack(wanted, axis=1)) < 1e-10


@pytest.mark.parametrize(("mode", "layers"), KINDS)
def test_gradients_of_everything(mode, layers):
    """Finite differences along random directions."""
    cell, x, dt = made(mode, layers, time=40)
    rng = np.random.default_rng(4)
    states, pullback = newton_vjp(cell, x, NewtonConfig(segment_len=8), dt=dt)
    weights, step = rng.standard_normal(states.shape), 1e-6
    grads = pullback(weights)
    assert set(grads.params) == set(cell.arrays)
    for label, found in {"x": grads.x, "dt": grads.drives["dt"], **grads.params}.items():
        way, ends = rng.standard_normal(found.shape), []
        for sign in (step, -step):
            moved = cell.replace(**{label: cell.arrays[label] + sign * way}) if label in cell.arrays else cell
            at = x + sign * way if label == "x" else x
            when = dt + sign * way if label == "dt" else dt
            ends.append(np.sum(weights * sequential_apply(moved, at, dt=when)))
        slope = (ends[0] - ends[1]) / (2 * step)
        assert np.sum(found * way) == pytest.approx(slope, rel=1e-5, abs=1e-5), label


@pytest.mark.parametrize(("mode", "layers"), KINDS)
def test_agreement_in_float32(mode, layers):
    cell, x, dt = made(mode, layers, dtype=np.float32, time=300)
    assert verify_agreement(cell, x, config=NewtonConfig(segment_len=32), dt=dt).ok
    assert verify_agreement(cell, x, dt=dt).ok


@pytest.mark.parametrize(("mode", "layers"), [("default", 2), ("pure", 1)])
def test_layers_of_a_module(mode, layers):
    torch = pytest.importorskip("torch")
    from pararnn import ParaRNN

    cell, x, dt = made(mode, layers, time=40)
    rnn = ParaRNN(cell, num_layers=2)
    assert all(layer.kind.mode == mode and layer.kind.backbone_layers == layers for layer in rnn.layers)
    tx, tdt = torch.from_numpy(x), torch.from_numpy(dt)
    y = rnn(tx, dt=tdt)
    torch.testing.assert_close(rnn.eval()(tx, dt=tdt), y, rtol=1e-9, atol=1e-11)
    y.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in rnn.parameters())


@pytest.mark.parametrize(
    "options", [{"mode": "full"}, {"backbone_layers": -1}, {"backbone_layers": True}, {"backbone_activation": "gelu"}]
)
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        StockCfC(3, 6, **options)
