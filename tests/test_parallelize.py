"""parallelize: torch.nn's recurrent layers and models of them, run in parallel with the same results and gradients."""

from __future__ import annotations

import copy
import itertools
import pickle
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence  # noqa: E402

import pararnn  # noqa: E402
from pararnn import NewtonConfig, NewtonStats, parallelize  # noqa: E402

SEGMENTS = NewtonConfig(segment_len=16)
KINDS = {
    "gru": (nn.GRU, {}),
    "lstm": (nn.LSTM, {}),
    "projected": (nn.LSTM, {"proj_size": 2}),
    "tanh": (nn.RNN, {}),
    "relu": (nn.RNN, {"nonlinearity": "relu"}),
}


def make(kind, features=3, width=5, *, seed=0, **options):
    torch.manual_seed(seed)
    cls, own = KINDS[kind]
    return cls(features, width, **{"dtype": torch.float64, **own, **options})


def draw(*shape, seed=1, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def starts_for(module, batch, seed=5):
    """h_0, of an LSTM (h_0, c_0), for a batch or (None) an unbatched sequence."""
    layers = module.num_layers * (2 if module.bidirectional else 1)
    sizes = [module.proj_size or module.hidden_size, module.hidden_size][: 2 if module.mode == "LSTM" else 1]
    rows = () if batch is None else (batch,)
    made = [draw(layers, *rows, n, seed=seed + n) for n in sizes]
    return tuple(made) if len(made) == 2 else made[0]


def listed(value):
    """Everything that a module returned, as tensors; of packed sequences the data and what orders it."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for part in value if part is not None for t in listed(part)]


def leaf(value):
    return tuple(leaf(v) for v in value) if isinstance(value, tuple) else value.detach().clone().requires_grad_()


def run_with_gradients(module, x, hx=None, lengths=None, sort=True, seed=7):
    """Every output, and the gradients of a weighted sum of them to input, starting states and weights."""
    x = leaf(x)
    hx = None if hx is None else leaf(hx)
    given = x
    if lengths is not None:
        given = pack_padded_sequence(x, torch.tensor(lengths), batch_first=module.batch_first, enforce_sorted=sort)
    torch.manual_seed(seed)
    outputs = listed(module(given) if hx is None else module(given, hx))
    floating = [y for y in outputs if y.is_floating_point()]
    loss = sum((y * draw(*y.shape, seed=11 + k, dtype=y.dtype)).sum() for k, y in enumerate(floating))
    leaves = [x, *([] if hx is None else listed(hx)), *module.parameters()]
    return outputs, torch.autograd.grad(loss, leaves)


def assert_same(found, wanted, tolerance=1e-10):
    for a, b in zip(itertools.chain(*found), itertools.chain(*wanted), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        if a.is_floating_point():
            assert (a - b).abs().max() <= tolerance * b.abs().max().clamp_min(1.0)
        else:
            assert torch.equal(a, b)


# The same forward and the same gradients, whatever torch.nn offers.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("layers", "batch_first", "bias"), [(1, True, True), (2, False, True), (2, True, False)])
def test_same_outputs_and_gradients(kind, bidirectional, layers, batch_first, bias):
    module = make(kind, num_layers=layers, bidirectional=bidirectional, batch_first=batch_first, bias=bias)
    parallel = parallelize(module, config=SEGMENTS)
    x = draw(3, 53, 3) if batch_first else draw(53, 3, 3)
    for hx in (None, starts_for(module, 3)):
        assert_same(run_with_gradients(parallel, x, hx), run_with_gradients(module, x, hx))
    assert parallel.last_stats.path == "segments" and parallel.last_stats.converged


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [[41, 29, 29, 3, 1], [3, 41, 1, 29, 41]])
def test_packed_sequences_in_any_order(kind, lengths):
    module = make(kind, num_layers=2, bidirectional=True, batch_first=True)
    parallel = parallelize(module, config=SEGMENTS)
    x, in_order = draw(5, 41, 3), lengths == sorted(lengths, reverse=True)
    for hx in (None, starts_for(module, 5)):
        found = run_with_gradients(parallel, x, hx, lengths, in_order)
        assert_same(found, run_with_gradients(module, x, hx, lengths, in_order))


def test_a_packed_sequence_comes_back_as_one():
    module = make("lstm", bidirectional=True)
    packed = pack_padded_sequence(draw(9, 3, 3), torch.tensor([2, 9, 5]), enforce_sorted=False)
    (found, _), (wanted, _) = parallelize(module, config=SEGMENTS)(packed), module(packed)
    assert type(found) is type(wanted) and torch.equal(found.batch_sizes, wanted.batch_sizes)
    (a, lengths), (b, others) = pad_packed_sequence(found), pad_packed_sequence(wanted)
    assert torch.equal(lengths, others) and (a - b).abs().max() < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_unbatched_input(kind):
    module = make(kind, num_layers=2, bidirectional=True, batch_first=True)
    parallel = parallelize(module, config=SEGMENTS)
    for hx in (None, starts_for(module, None)):
        assert_same(run_with_gradients(parallel, draw(37, 3), hx), run_with_gradients(module, draw(37, 3), hx))


@pytest.mark.parametrize("kind", ["gru", "lstm"])
@pytest.mark.parametrize("lengths", [None, [19, 7, 7]])
def test_dropout_acts_between_layers_while_training_and_one_seed_drops_the_same(kind, lengths):
    module = make(kind, num_layers=3, dropout=0.4, batch_first=True)
    parallel = parallelize(module, config=SEGMENTS)
    x = draw(3, 19, 3)
    assert_same(run_with_gradients(parallel, x, None, lengths), run_with_gradients(module, x, None, lengths))
    first, second = (run_with_gradients(parallel, x, None, lengths, seed=s)[0][0] for s in (1, 2))
    assert not torch.equal(first, second)
    parallel.eval()
    module.eval()
    assert_same(run_with_gradients(parallel, x, None, lengths), run_with_gradients(module, x, None, lengths))


@pytest.mark.parametrize("kind", ["gru", "lstm", "tanh"])
def test_single_precision_within_1e_5(kind):
    module = make(kind, 8, 32, batch_first=True, dtype=torch.float32)
    parallel = parallelize(module, config=NewtonConfig(segment_len=64))
    x = draw(2, 1000, 8, dtype=torch.float32)
    with torch.no_grad():
        found, wanted = parallel(x)[0], module.double()(x.double())[0]
        module.float()
    assert (found.double() - wanted).abs().max() < 1e-5 * wanted.abs().max()
    _, grads = run_with_gradients(parallel, x)
    module.double()
    _, exact = run_with_gradients(module, x.double())
    for a, b in zip(grads, exact, strict=True):
        assert (a.double() - b).abs().max() < 1e-5 * b.abs().max()


def test_more_than_65535_steps():
    module = make("gru", 2, 4, batch_first=True)
    parallel = parallelize(module)
    x = draw(1, 70_001, 2)
    with torch.no_grad():
        found, wanted = parallel(x), module(x)
    assert (found[0] - wanted[0]).abs().max() < 1e-10 and (found[1] - wanted[1]).abs().max() < 1e-10
    assert parallel.last_stats.path == "segments"


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_finite_differences(kind):
    module = parallelize(make(kind, 2, 3, batch_first=True), config=NewtonConfig(segment_len=4))
    names, weights = zip(*module.named_parameters(), strict=True)

    def outputs(x, *values):
        return torch.func.functional_call(module, dict(zip(names, values, strict=True)), (x,))[0]

    assert torch.autograd.gradcheck(outputs, (draw(2, 11, 2).requires_grad_(), *weights))


def remembering(kind):
    """Networks that forget slowly, by what makes them."""
    module = make("lstm" if "lstm" in kind else "gru" if "gru" in kind else "tanh", 3, 32, batch_first=True)
    weight = module.weight_hh_l0
    with torch.no_grad():
        if kind == "lstm, forget gate +3":
            module.bias_ih_l0[32:64] += 3.0
        elif kind == "orthogonal":
            weight.copy_(torch.linalg.qr(draw(32, 32))[0])
        elif kind == "spectral radius 1.1":
            weight.copy_(draw(32, 32) * 1.1 / 32**0.5)
        else:
            weight.mul_(3.0)
    return module


@pytest.mark.parametrize("kind", ["lstm, forget gate +3", "orthogonal", "spectral radius 1.1", "gru, weights x3"])
def test_networks_that_remember(kind):
    module, x = remembering(kind), draw(2, 1000, 3)
    parallel = parallelize(module, config=NewtonConfig(segment_len=64))
    assert_same(run_with_gradients(parallel, x), run_with_gradients(module, x))
    assert parallel.last_stats.converged


# Sequences do not touch each other.


def test_an_unbounded_network_may_overflow_only_behind_nothing():
    module = make("relu", 1, 2, batch_first=True)
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(torch.eye(2) * 1e3 if name == "weight_hh_l0" else torch.ones_like(p))
    parallel, x = parallelize(module, config=SEGMENTS), torch.ones(2, 200, 1, dtype=torch.float64)
    # 10^(3·200) is beyond float64; the second sequence ends long before, and its gradient must know nothing of it.
    for lengths in ([200, 20], [20, 20]):
        hidden = []
        for m in (parallel, module):
            m.zero_grad()
            given = leaf(x)
            y = pad_packed_sequence(m(pack_padded_sequence(given, torch.tensor(lengths), batch_first=True))[0], True)[0]
            y[1, :20].sum().backward()
            hidden.append(torch.cat((y[1, :20].flatten(), given.grad[1, :20].flatten())))
        assert torch.isfinite(hidden[0]).all()
        assert ((hidden[0] - hidden[1]).abs() <= 1e-9 * hidden[1].abs()).all()


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_nan_stays_in_its_sequence_and_from_its_step_on(kind):
    module, x = make(kind, batch_first=True), draw(3, 50, 3)
    x[1, 20] = torch.nan
    with torch.no_grad():
        found, wanted = parallelize(module, config=SEGMENTS)(x)[0], module(x)[0]
    assert torch.equal(found.isnan(), wanted.isnan()) and wanted[1, 20:].isnan().all() and not found[0].isnan().any()
    assert (found - wanted).nan_to_num().abs().max() < 1e-10


# Where torch.nn's own loop is faster, it runs.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [None, [5, 9, 2]])
def test_short_sequences_are_left_to_torchs_own_loop(kind, lengths):
    module = make(kind, num_layers=2, bidirectional=True, batch_first=True)
    parallel = parallelize(module)
    for hx in (None, starts_for(module, 3)):
        found = run_with_gradients(parallel, draw(3, 9, 3), hx, lengths, sort=False)
        assert_same(found, run_with_gradients(module, draw(3, 9, 3), hx, lengths, sort=False), 0.0)
    stats = parallel.last_stats
    assert (stats.path, stats.scan_backend, stats.exact) == ("sequential", "torch.nn", True) and stats.reason


def test_orders_are_followed_and_long_sequences_are_not_left():
    module, x = make("gru", batch_first=True), draw(1, 9, 3)
    for config in (SEGMENTS, NewtonConfig(scan_backend="torch"), NewtonConfig(exact=True)):
        parallel = parallelize(module, config=config)
        assert_same(run_with_gradients(parallel, x), run_with_gradients(module, x))
        assert parallel.last_stats.scan_backend != "torch.nn"
    parallel = parallelize(module)
    parallel(draw(1, 4000, 3))
    assert parallel.last_stats.path == "segments"


def test_a_chaotic_network_is_right_and_then_left_to_torch_for_a_while():
    module = make("tanh", 2, 64, batch_first=True)
    with torch.no_grad():
        module.weight_hh_l0.mul_(6.0)
    parallel, x = parallelize(module), draw(1, 3000, 2)
    with torch.no_grad():
        wanted = module(x)[0]
        # Chaos doubles a rounding every step or so; what the loop makes of other roundings is as right.
        close = (wanted[:, :20] - parallel(x)[0][:, :20]).abs().max()
        assert close < 1e-6 and parallel.last_stats.walked == 1.0
        for _ in range(16):
            assert torch.equal(parallel(x)[0], wanted) and "did not settle" in parallel.last_stats.reason
        parallel(x)
    assert parallel.last_stats.scan_backend != "torch.nn"


def test_autocast_changes_nothing_about_the_recurrence():
    module = make("gru", 3, 5, batch_first=True, dtype=torch.float32)
    x = draw(2, 40, 3, dtype=torch.float32)
    for config in (None, SEGMENTS):
        parallel = parallelize(module, config=config)
        with torch.autocast("cpu", torch.bfloat16):
            found, from_half = parallel(x)[0], parallel(x.bfloat16(), torch.zeros(1, 2, 5).bfloat16())[0]
        assert torch.equal(found, parallel(x)[0])
        assert from_half.dtype == torch.float32 and 0.0 < (from_half - found).abs().max() < 2e-2


# One network: weights, state_dict, copies, optimisers.


def test_weights_are_shared_not_copied():
    module = make("lstm", num_layers=2, bidirectional=True)
    before = dict(module.__dict__)
    parallel = parallelize(module, config=SEGMENTS)
    for (name, ours), (theirs_name, theirs) in zip(
        parallel.named_parameters(), module.named_parameters(), strict=True
    ):
        assert name == theirs_name and ours is theirs
    assert type(module) is nn.LSTM and module.__dict__.keys() == before.keys()
    optimiser = torch.optim.SGD(parallel.parameters(), lr=0.1)
    parallel(draw(7, 2, 3))[0].square().sum().backward()
    optimiser.step()
    x = draw(20, 2, 3)
    assert (parallel(x)[0] - module(x)[0]).abs().max() < 1e-12
    with torch.no_grad():
        module.weight_ih_l0.mul_(2.0)
    assert (parallel(x)[0] - module(x)[0]).abs().max() < 1e-12


def test_state_dict_in_and_out():
    module, other = make("gru", num_layers=2), make("gru", num_layers=2, seed=9)
    parallel, x = parallelize(module, config=SEGMENTS), draw(20, 2, 3)
    assert list(parallel.state_dict()) == list(module.state_dict())
    parallel.load_state_dict(other.state_dict())
    assert (parallel(x)[0] - other(x)[0]).abs().max() < 1e-12
    fresh = make("gru", num_layers=2, seed=4)
    fresh.load_state_dict(parallel.state_dict())
    assert torch.equal(fresh(x)[0], other(x)[0])


def test_copies_are_networks_of_their_own():
    parallel, x = parallelize(make("lstm", proj_size=2), config=SEGMENTS), draw(40, 2, 3)
    wanted = parallel(x)[0]
    for twin in (copy.deepcopy(parallel), pickle.loads(pickle.dumps(parallel))):
        assert twin.config == SEGMENTS and torch.equal(twin(x)[0], wanted)
        with torch.no_grad():
            twin.weight_ih_l0.zero_()
        assert not torch.equal(twin(x)[0], wanted) and torch.equal(parallel(x)[0], wanted)


def test_dtype_and_mode_follow():
    parallel = parallelize(make("gru", dtype=torch.float32), config=SEGMENTS)
    assert parallel.double()(draw(9, 2, 3))[0].dtype == torch.float64
    assert parallel.half()(draw(9, 2, 3, dtype=torch.float16))[0].dtype == torch.float16
    assert parallel.training and not parallel.eval().training


def test_a_parametrization_on_the_result_is_used():
    parallel, x = parallelize(make("gru"), config=SEGMENTS), draw(30, 2, 3)
    twin = copy.deepcopy(parallel)
    with torch.no_grad():
        twin.weight_hh_l0.mul_(0.5)

    class Half(nn.Module):
        def forward(self, weight):
            return 0.5 * weight

    nn.utils.parametrize.register_parametrization(parallel, "weight_hh_l0", Half())
    assert (parallel(x)[0] - twin(x)[0]).abs().max() < 1e-12


def test_last_stats_is_the_worst_of_all_layers():
    parallel = parallelize(make("gru", num_layers=2, bidirectional=True), config=SEGMENTS)
    assert parallel.last_stats is None
    parallel(draw(50, 2, 3))
    assert isinstance(parallel.last_stats, NewtonStats) and parallel.last_stats.segment_len == 16


def test_printing_names_the_layer():
    assert repr(parallelize(nn.GRU(3, 4, 2))) == "ParallelGRU(3, 4, num_layers=2)"


def test_training_takes_the_same_course():
    """One seed, one loss curve, up to rounding."""
    curves = []
    for wrap in (lambda m: m, lambda m: parallelize(m, config=SEGMENTS)):
        torch.manual_seed(0)
        model = wrap(nn.ModuleDict({"rnn": nn.GRU(3, 8, 2, batch_first=True), "out": nn.Linear(8, 1)}).double())
        optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
        x = draw(4, 60, 3)
        y, losses = x.cumsum(1)[..., :1].sin(), []
        for _ in range(15):
            loss = (model["out"](model["rnn"](x)[0]) - y).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
        curves.append(losses)
    assert curves[0][-1] < curves[0][0]
    assert max(abs(a - b) for a, b in zip(*curves, strict=True)) < 1e-9


# Models.


class Tagger(nn.Module):
    """Holds a layer by name, in a list, and in a bound method."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 3)
        self.encoder = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
        self.rnn = nn.GRU(3, 4, batch_first=True, bidirectional=True)
        self.again = self.rnn
        self.blocks = nn.ModuleList([nn.LSTM(8, 8, batch_first=True), nn.BatchNorm1d(8)])
        self.plain = {"first": [self.rnn]}
        self.call = self.head

    def head(self, y):
        return self.blocks[0](y)[0]

    def forward(self, tokens):
        y = self.plain["first"][0](self.encoder(self.embed(tokens)))[0]
        return self.blocks[1](self.call(y).transpose(1, 2))


def test_a_model_keeps_its_shape_and_the_given_one_is_left_alone():
    torch.manual_seed(0)
    model = Tagger().eval()
    parallel = parallelize(model, config=SEGMENTS)
    assert type(parallel) is Tagger and parallel is not model
    assert type(model.rnn) is nn.GRU and type(parallel.rnn).__name__ == "ParallelGRU"
    assert parallel.again is parallel.rnn is parallel.plain["first"][0] and parallel.call.__self__ is parallel
    assert type(parallel.blocks[0]).__name__ == "ParallelLSTM"
    assert list(parallel.state_dict()) == list(model.state_dict())
    pairs = zip(parallel.parameters(), model.parameters(), strict=True)
    assert all(a is b for a, b in pairs)
    tokens = torch.randint(11, (2, 90), generator=torch.Generator().manual_seed(0))
    assert (parallel(tokens) - model(tokens)).abs().max() < 1e-5
    assert parallel.blocks[0].last_stats.converged
    parallel.train()
    assert not model.encoder[1].training and parallel.encoder[1].training and not model.training


def test_hooks_come_along_and_are_each_modules_own():
    model, seen = nn.Sequential(nn.GRU(3, 4)), []
    handle = model[0].register_forward_hook(lambda module, *rest: seen.append(type(module).__name__))
    parallel, x = parallelize(model, config=SEGMENTS), torch.zeros(20, 1, 3)
    parallel(x), model(x)
    handle.remove()
    parallel(x), model(x)
    assert seen == ["ParallelGRU", "GRU", "ParallelGRU"]


def test_a_traced_model_and_torch_func():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.GRU(3, 4, batch_first=True))
    parallel, x = parallelize(torch.fx.symbolic_trace(model), config=SEGMENTS), torch.randn(5, 2, 40, 3)
    assert (parallel(x[0])[0] - model(x[0])[0]).abs().max() < 1e-6
    each = torch.stack([model(part)[0] for part in x])
    assert (torch.func.vmap(lambda part: parallel(part)[0])(x) - each).abs().max() < 1e-6


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_gradients_by_sample_and_ensembles(kind):
    module = make(kind, num_layers=2, bidirectional=True, batch_first=True)
    parallel, x = parallelize(module, config=SEGMENTS), draw(3, 40, 3)

    def loss(weights, sample):
        return torch.func.functional_call(parallel, weights, (sample[None],))[0].square().sum()

    weights = dict(parallel.named_parameters())
    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, x)
    for n in range(3):
        wanted = torch.autograd.grad(module(x[n : n + 1])[0].square().sum(), list(module.parameters()))
        assert all((a[n] - b).abs().max() < 1e-10 for a, b in zip(found.values(), wanted, strict=True))
    several = [parallelize(make(kind, seed=seed, batch_first=True), config=SEGMENTS) for seed in range(3)]
    stacked, _ = torch.func.stack_module_state(several)
    outputs = torch.func.vmap(lambda w: torch.func.functional_call(several[0], w, (x,))[0])(stacked)
    for member, output in zip(several, outputs, strict=True):
        assert (member(x)[0] - output).abs().max() < 1e-10


def test_second_derivatives_are_refused_and_torchs_loop_still_gives_them():
    module, x = make("gru", batch_first=True), draw(1, 20, 3).requires_grad_()
    for parallel, refused in ((parallelize(module, config=SEGMENTS), True), (parallelize(module), False)):
        (first,) = torch.autograd.grad(parallel(x)[0].square().sum(), x, create_graph=True)
        if refused:
            with pytest.raises(RuntimeError, match="first derivatives"):
                first.sum().backward()
        else:
            first.sum().backward()


def test_a_batch_of_nothing():
    assert parallelize(nn.LSTM(3, 4, batch_first=True), config=SEGMENTS)(torch.zeros(0, 40, 3))[0].shape == (0, 40, 4)


def test_a_parallel_model_takes_a_new_configuration():
    model = nn.Sequential(parallelize(nn.GRU(3, 4)))
    assert parallelize(model, config=SEGMENTS)[0].config == SEGMENTS and model[0].config == NewtonConfig()


# Cells.


@pytest.mark.parametrize("kind", ["GRUCell", "LSTMCell", "RNNCell", "relu"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_step_cell_becomes_its_loop(kind, bias):
    torch.manual_seed(0)
    options = {"nonlinearity": "relu"} if kind == "relu" else {}
    cell = getattr(nn, "RNNCell" if kind == "relu" else kind)(3, 5, bias=bias, dtype=torch.float64, **options)
    loop = parallelize(cell, config=SEGMENTS)
    assert list(loop.state_dict()) == list(cell.state_dict())
    pair = kind == "LSTMCell"
    x, h0 = leaf(draw(2, 45, 3)), leaf((draw(2, 5), draw(2, 5, seed=2)) if pair else draw(2, 5))
    state, rows = h0, []
    for t in range(45):
        state = cell(x[:, t], state)
        rows.append(state[0] if pair else state)
    wanted = [torch.stack(rows, 1), *listed(state)]
    out, end = loop(x, h0)
    found = [out, *listed(end)]
    leaves = [x, *listed(h0), *cell.parameters()]
    grads = [torch.autograd.grad(sum((y * draw(*y.shape)).sum() for y in ys), leaves) for ys in (found, wanted)]
    assert_same((found, grads[0]), (wanted, grads[1]))
    assert loop.last_stats.path == "segments"
    alone, last = loop(x[0], tuple(h[0] for h in h0) if pair else h0[0])
    assert (alone - out[0]).abs().max() < 1e-12 and listed(last)[0].shape == (5,)


def test_a_step_cell_copies_and_refuses():
    loop = parallelize(nn.LSTMCell(3, 5))
    x = draw(2, 9, 3, dtype=torch.float32)
    assert torch.equal(copy.deepcopy(loop)(x)[0], loop(x)[0])
    for bad, h0 in ((x[:, :0], None), (x[..., None], None), (x, torch.zeros(2, 5)), (x, (torch.zeros(2, 4),) * 2)):
        with pytest.raises(ValueError, match="CellOverTime: "):
            loop(bad, h0)


# Compilation.


@pytest.mark.parametrize("kind", ["gru", "projected"])
def test_torch_compile_follows_in_one_graph_where_it_may_look_into_recurrent_modules(kind):
    module = make(kind, num_layers=2, bidirectional=True, batch_first=True)
    parallel, x = parallelize(module, config=SEGMENTS), draw(2, 40, 3)
    with torch._dynamo.config.patch(allow_rnn=True):
        compiled = torch.compile(parallel, backend="aot_eager", fullgraph=True)
        for hx in (None, starts_for(module, 2)):
            assert_same(run_with_gradients(compiled, x, hx), run_with_gradients(module, x, hx))
    torch._dynamo.reset()
    assert parallel.last_stats.path == "segments"


def test_torch_compile_leaves_the_module_to_python_otherwise():
    module = make("gru", batch_first=True)
    compiled = torch.compile(parallelize(module, config=SEGMENTS), backend="aot_eager")
    assert_same((compiled(draw(2, 40, 3)), ()), (module(draw(2, 40, 3)), ()))
    torch._dynamo.reset()


# Refusals.


class OwnGRU(nn.GRU):
    pass


class Stepping(nn.Module):
    def __init__(self):
        super().__init__()
        self.step = nn.GRUCell(3, 4)


@pytest.mark.parametrize(
    ("make_it", "error", "sentence"),
    [
        (lambda: 3, TypeError, "wanted a torch.nn.Module, got int"),
        (lambda: nn.Linear(2, 2), ValueError, "found no nn.GRU, nn.LSTM or nn.RNN in Linear"),
        (Stepping, ValueError, "step computes single steps"),
        (lambda: OwnGRU(3, 4), TypeError, "subclass of torch.nn's layer"),
        (lambda: nn.Sequential(OwnGRU(3, 4)), TypeError, "0 \\(OwnGRU\\)"),
        (lambda: nn.DataParallel(nn.GRU(3, 4)), TypeError, "parallelize the model, then wrap it"),
        (lambda: torch.compile(nn.GRU(3, 4)), TypeError, "then torch.compile it"),
        (lambda: nn.utils.parametrizations.orthogonal(nn.GRU(4, 4), "weight_hh_l0"), TypeError, "parametrize the res"),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_sentence(make_it, error, sentence):
    with pytest.raises(error, match=sentence):
        parallelize(make_it())


def test_config_must_be_a_configuration():
    with pytest.raises(TypeError, match="NewtonConfig"):
        parallelize(nn.GRU(3, 4), config={"segment_len": 4})


X, H = torch.zeros(7, 2, 3), torch.zeros(1, 2, 4)


@pytest.mark.parametrize(
    ("kind", "given", "error", "sentence"),
    [
        (nn.GRU, ([1.0],), TypeError, "tensor or a PackedSequence, got list"),
        (nn.GRU, (X[0, 0],), ValueError, r"got shape \(3,\)"),
        (nn.GRU, (X[..., :2],), RuntimeError, "input_size=3, got 2"),
        (nn.GRU, (X.double(),), ValueError, "float64 but the weights are torch.float32"),
        (nn.GRU, (X, H.double()), ValueError, "h_0 is torch.float64"),
        (nn.GRU, (X[:0],), RuntimeError, "at least one step"),
        (nn.GRU, (X, H[:, :1]), RuntimeError, r"h_0 must have shape \(1, 2, 4\), got \(1, 1, 4\)"),
        (nn.GRU, (X, H[:, 0]), RuntimeError, "3 axes"),
        (nn.GRU, (X[:, 0], H), RuntimeError, "2 axes"),
        (nn.GRU, (X, (H, H)), TypeError, "must be a tensor h_0, got tuple"),
        (nn.LSTM, (X, H), TypeError, "pair of tensors"),
        (nn.LSTM, (X, (H, H[..., :3])), RuntimeError, "c_0 must have shape"),
    ],
)
def test_input_that_does_not_fit_is_refused(kind, given, error, sentence):
    module = kind(3, 4)
    with pytest.raises(error, match=sentence):
        parallelize(module)(*given)
    with pytest.raises((AttributeError, IndexError, TypeError, ValueError, RuntimeError)):
        module(*given)


def test_importing_pararnn_loads_no_torch():
    code = "import sys, pararnn; 'parallelize' in dir(pararnn); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert "parallelize" in dir(pararnn)
