"""ParaRNN: what the module promises about modes, shapes, layers, states, copies and checks."""

from __future__ import annotations

import copy
import io
import logging
import math
import pickle
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import pararnn  # noqa: E402
from pararnn import (  # noqa: E402
    AgreementError,
    ChannelwiseCell,
    NewtonConfig,
    NewtonDivergenceError,
    ParaGRU,
    ParaLSTM,
    ParaRNN,
    ParaSLSTM,
    ParaTanh,
    newton_apply,
    sequential_apply,
    verify_agreement,
)
from pararnn.distributed import last_newton_residuals, unwrap_distributed  # noqa: E402
from support import CELLS  # noqa: E402
from torch_support import worst  # noqa: E402


class Halves(ChannelwiseCell):
    """A cell with an option, to see that layers above the first keep it."""

    slots, gates, params, options = ("h",), ("u",), ("a",), ("keep",)

    def __init__(self, *sizes, keep=0.5, **keywords):
        self.__dict__["keep"] = keep
        super().__init__(*sizes, **keywords)

    def step(self, xp, h, u, a):
        return (self.keep * h + (1.0 - self.keep) * xp.tanh(a * h + u),)


def module(kind=ParaGRU, layers=1, *, features=3, width=5, dtype=torch.float64, **options):
    torch.manual_seed(1)
    return ParaRNN(kind(features, width, seed=0, dtype=dtype), num_layers=layers, **options)


def x_of(*shape, dtype=torch.float64, seed=2):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def hidden(cell, states):
    return states if cell.state_slots == 1 else states[:, :, cell.hidden_slot]


# --- output ------


@pytest.mark.parametrize("kind", CELLS)
def test_the_output_is_the_hidden_slot_of_the_cell_s_states(kind):
    rnn, x = module(kind), x_of(2, 40, 3)
    states = newton_apply(rnn.layers[0].cell, x)
    assert torch.equal(rnn(x), hidden(rnn.layers[0].cell, states))
    rnn.output_hidden = False
    assert torch.equal(rnn(x), states)
    rnn.return_hidden = True
    assert torch.equal(rnn(x)[1], states[:, -1])


@pytest.mark.parametrize("kind", CELLS)
def test_P50_training_is_parallel_evaluation_is_the_loop_and_an_order_is_followed(kind):
    rnn, x = module(kind, config=NewtonConfig(segment_len=8)), x_of(2, 50, 3)
    paths = {}
    for solver in ("auto", "newton", "sequential"):
        for training in (True, False):
            rnn.solver = solver
            rnn.train(training)
            with torch.no_grad():
                y = rnn(x)
            paths[solver, training] = rnn.last_stats.path
            assert worst([y], [hidden(rnn.layers[0].cell, sequential_apply(rnn.layers[0].cell, x))]) < 1e-9
    parallel = {key for key, path in paths.items() if path == "segments"}
    assert parallel == {("auto", True), ("newton", True), ("newton", False)}
    assert set(paths.values()) == {"segments", "sequential"}


def test_a_forward_in_evaluation_mode_has_gradients_even_twice():
    rnn, x = module().eval(), x_of(1, 6, 3).requires_grad_()
    (first,) = torch.autograd.grad(rnn(x).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    assert second.abs().max() > 0.0 and rnn.last_stats.path == "sequential"


def test_layers_read_the_hidden_slot_of_the_one_below():
    rnn, x = module(ParaLSTM, 3), x_of(2, 30, 3)
    y = x
    for layer in rnn.layers:
        y = sequential_apply(layer.cell, y)[:, :, 1]
    assert worst([rnn(x)], [y]) < 1e-9
    assert [layer.cell.d_in for layer in rnn.layers] == [3, 5, 5]


def test_a_list_of_cells_is_a_stack():
    cells = [ParaGRU(3, 4, seed=0), ParaSLSTM(4, 6, seed=1), ParaTanh(6, 2, seed=2)]
    rnn = ParaRNN(cells)
    assert rnn.num_layers == 3 and rnn(x_of(1, 9, 3, dtype=torch.float32)).shape == (1, 9, 2)
    for layer, cell in zip(rnn.layers, cells, strict=True):
        assert type(layer.cell) is type(cell)
        assert all(np.array_equal(a, layer.cell.to(np).arrays[n]) for n, a in cell.arrays.items())


@pytest.mark.parametrize(
    "cell",
    [
        Halves(3, 4, keep=0.9, max_recurrent_norm=0.25),
        ParaSLSTM(3, 4, eps=1e-3, max_recurrent_norm=None),
        ParaLSTM(3, 4, max_recurrent_norm=0.1),
    ],
    ids=lambda c: type(c).__name__,
)
def test_layers_above_the_first_keep_class_clamp_and_options(cell):
    rnn = ParaRNN(cell, num_layers=3)
    for layer in rnn.layers[1:]:
        assert (layer.cell.d_in, layer.cell.d_h) == (4, 4) and type(layer.cell) is type(cell)
        assert layer.cell.max_recurrent_norm == cell.max_recurrent_norm
        assert all(getattr(layer.cell, o) == getattr(cell, o) for o in cell.options)
    assert not torch.equal(rnn.layers[1].W_x.weight, rnn.layers[2].W_x.weight)


def test_batch_first_or_time_first():
    rnn, x = module(ParaLSTM), x_of(2, 30, 3)
    other = ParaRNN(rnn.layers[0].cell, batch_first=False, return_hidden=True)
    y, last = other(x.transpose(0, 1))
    assert torch.equal(y.transpose(0, 1), rnn(x)) and last.shape == (2, 2, 5)


def test_dropout_is_between_layers_and_only_while_training():
    torch.manual_seed(0)
    rnn, x = module(ParaTanh, 2, dropout=0.5), x_of(2, 30, 3)
    assert not torch.equal(rnn(x), rnn(x))
    rnn.dropout = 1.0
    silent = sequential_apply(rnn.layers[1].cell, torch.zeros(2, 30, 5, dtype=torch.float64))
    assert worst([rnn(x)], [silent]) < 1e-9
    rnn.eval()
    assert torch.equal(rnn(x), rnn(x))
    single = module(dropout=1.0)
    assert torch.equal(single(x), single(x)) and single(x).any()


def test_P42_memory_layout_of_the_input_does_not_matter():
    rnn, x = module(), x_of(4, 20, 3)
    for strange in (x.transpose(0, 1).contiguous().transpose(0, 1), torch.cat([x, x], 2)[..., :3], x.flip(0).flip(0)):
        assert torch.equal(rnn(strange), rnn(x))
    assert torch.allclose(rnn(x[::2]), rnn(x)[::2], atol=1e-12)


@pytest.mark.parametrize("shape", [(0, 5, 3), (0, 0, 3), (2, 0, 3)])
def test_O52_empty_input_has_empty_output_and_gradients(shape):
    rnn = module(ParaLSTM, 2)
    for training in (True, False):
        x = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
        y = rnn.train(training)(x)
        y.sum().backward()
        assert y.shape == (*shape[:2], 5) and x.grad.shape == shape
        assert not any(p.grad.any() for p in rnn.parameters())


@pytest.mark.parametrize("training", [True, False])
def test_a_sequence_without_a_step(training):
    rnn = module(ParaLSTM, 2, return_hidden=True, hidden_layout="pytorch").train(training)
    start = (x_of(2, 3, 5), x_of(2, 3, 5, seed=3))
    y, ends = rnn(torch.zeros(3, 0, 3, dtype=torch.float64), start)
    assert y.shape == (3, 0, 5) and all(torch.equal(a, b) for a, b in zip(ends, start, strict=True))
    y, ends = rnn(torch.zeros(3, 0, 3, dtype=torch.float64))
    assert not any(e.any() for e in ends)


# --- states in and out ------


@pytest.mark.parametrize("layout", ["paper", "pytorch"])
@pytest.mark.parametrize("kind", CELLS)
def test_a_sequence_in_two_calls_with_the_state_carried(kind, layout):
    """P51, O13: the returned state starts the next call, and the gradient crosses."""
    rnn = module(kind, return_hidden=True, hidden_layout=layout)
    x = x_of(2, 30, 3).requires_grad_()
    y, end = rnn(x)
    first, state = rnn(x[:, :13])
    second, last = rnn(x[:, 13:], state)
    assert worst([torch.cat([first, second], 1)], [y]) < 1e-9
    for a, b in zip(last, end, strict=True):
        assert worst([a], [b]) < 1e-9
    (crossing,) = torch.autograd.grad(second.sum(), x)
    assert worst([crossing], torch.autograd.grad(y[:, 13:].sum(), x)) < 1e-9


def test_the_layout_of_torch_nn():
    rnn = module(ParaLSTM, 2, return_hidden=True, hidden_layout="pytorch")
    x = x_of(3, 8, 3)
    y, (h, c) = rnn(x)
    assert h.shape == c.shape == (2, 3, 5) and torch.equal(h[-1], y[:, -1])
    states = newton_apply(rnn.layers[0].cell, x)
    assert torch.equal(c[0], states[:, -1, 0]) and torch.equal(h[0], states[:, -1, 1])
    _, h = module(ParaGRU, 2, return_hidden=True, hidden_layout="pytorch")(x)
    assert h.shape == (2, 3, 5)
    _, slots = module(ParaSLSTM, 2, return_hidden=True, hidden_layout="pytorch")(x)
    assert len(slots) == 4 and slots[0].shape == (2, 3, 5)


def test_the_layout_of_the_papers():
    rnn, x = module(ParaLSTM, 2, return_hidden=True), x_of(3, 8, 3)
    y, last = rnn(x)
    assert last.shape == (3, 2, 5) and torch.equal(last[:, 1], y[:, -1])
    starts = [0.3 * x_of(3, 2, 5), None]
    below = sequential_apply(rnn.layers[0].cell, x, starts[0])[:, :, 1]
    wanted = sequential_apply(rnn.layers[1].cell, below)[:, :, 1]
    zero = torch.zeros(3, 2, 5, dtype=torch.float64)
    for given in (starts, tuple(starts), torch.stack([starts[0], zero])):
        assert worst([rnn(x, given)[0]], [wanted]) < 1e-9


def test_h0_gets_gradients():
    for layout in ("paper", "pytorch"):
        rnn = module(ParaGRU, hidden_layout=layout)
        h0 = x_of(*((2, 5) if layout == "paper" else (1, 2, 5))).requires_grad_()
        rnn(x_of(2, 4, 3), h0).sum().backward()
        assert h0.grad.abs().max() > 0.0


# --- what is refused ------


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"solver": "parallel"}, ValueError, "solver"),
        ({"hidden_layout": "jax"}, ValueError, "hidden_layout"),
        ({"dropout": 1.5}, ValueError, "dropout"),
        ({"dropout": True}, ValueError, "dropout"),
        ({"num_layers": 0}, ValueError, "num_layers"),
        ({"num_layers": 1.0}, ValueError, "num_layers"),
        ({"num_layers": True}, ValueError, "num_layers"),
        ({"config": {"max_iters": 3}}, TypeError, "NewtonConfig"),
        ({"dtype": torch.int64}, TypeError, "floating torch dtype"),
        ({"dtype": "float32"}, TypeError, "floating torch dtype"),
    ],
)
def test_arguments_that_do_not_fit(options, error, sentence):
    with pytest.raises(error, match=sentence):
        ParaRNN(ParaGRU(3, 4), **options)


@pytest.mark.parametrize(
    ("cell", "options", "error", "sentence"),
    [
        ("gru", {}, TypeError, "a cell or a list of cells"),
        (torch.nn.GRUCell(3, 4), {}, TypeError, "a cell or a list of cells.*GRUCell"),
        ([ParaGRU(3, 4), "gru"], {}, TypeError, "list of cells"),
        ([], {}, ValueError, "empty"),
        ([ParaGRU(3, 4), ParaGRU(5, 4)], {}, ValueError, "5 input features.*4 channels"),
        ([ParaGRU(3, 4), ParaGRU(4, 4)], {"num_layers": 3}, ValueError, "num_layers=3.*2 cells"),
        ([ParaGRU(3, 4), ParaLSTM(4, 4)], {"hidden_layout": "pytorch"}, ValueError, "same shape"),
    ],
)
def test_cells_that_do_not_fit(cell, options, error, sentence):
    with pytest.raises(error, match=sentence):
        ParaRNN(cell, **options)


@pytest.mark.parametrize("training", [True, False])
def test_input_that_does_not_fit(training):
    rnn = module(ParaLSTM, 2).train(training)
    for x, error, sentence in [
        (x_of(4, 3), ValueError, r"3 axes \(B, T, I\)"),
        (x_of(2, 4, 5), ValueError, "takes 3 features"),
        (x_of(2, 4, 3).float(), TypeError, r"float32 but the module is .*float64"),
        (torch.zeros(2, 4, 3, dtype=torch.int64), TypeError, "floating"),
        (np.zeros((2, 4, 3)), TypeError, "torch tensor, got ndarray"),
        (None, TypeError, "torch tensor"),
    ]:
        with pytest.raises(error, match=sentence):
            rnn(x)
    with pytest.raises(ValueError, match=r"cu_seqlens must be \[0, .*, 4\]"):
        rnn(x_of(1, 4, 3), cu_seqlens=torch.tensor([0, 2, 5]))


@pytest.mark.parametrize(
    ("kind", "layers", "layout", "shape"),
    [
        (ParaGRU, 1, "paper", (5,)),
        (ParaGRU, 1, "paper", (3, 5)),
        (ParaGRU, 2, "paper", (2, 5)),
        (ParaGRU, 2, "pytorch", (2, 5)),
        (ParaGRU, 2, "pytorch", (3, 2, 5)),
        (ParaLSTM, 1, "paper", (2, 5)),
        (ParaLSTM, 1, "pytorch", (1, 2, 5)),
    ],
)
def test_h0_that_does_not_fit(kind, layers, layout, shape):
    rnn = module(kind, layers, hidden_layout=layout)
    with pytest.raises(ValueError, match="h0 must"):
        rnn(x_of(2, 4, 3), x_of(*shape))


def test_h0_of_a_wrong_type_or_count():
    rnn = module(ParaLSTM, 2, hidden_layout="pytorch")
    with pytest.raises(TypeError, match=r"h0.*ndarray"):
        rnn(x_of(2, 4, 3), np.zeros((2, 2, 5)))
    with pytest.raises(ValueError, match=r"tuple \(h, c\) of tensors \(2, B, 5\)"):
        rnn(x_of(2, 4, 3), (x_of(2, 2, 5),))
    with pytest.raises(ValueError, match="list of 2 states"):
        module(ParaGRU, 2)(x_of(2, 4, 3), [x_of(2, 5)])


# --- parameters ------


def test_parameters_carry_the_names_of_the_cell_s_arrays():
    assert set(module(ParaGRU, 2).state_dict()) == {
        f"layers.{k}.{name}" for k in (0, 1) for name in ("a_z", "a_r", "a_n", "W_x.weight", "W_x.bias")
    }
    assert dict(module(ParaSLSTM).named_parameters())["layers.0.R"].shape == (4, 5)


def test_the_given_cell_is_a_value_but_parameters_are_shared():
    cell = ParaGRU(3, 4, dtype=torch.float64, seed=0)
    rnn = ParaRNN(cell)
    with torch.no_grad():
        rnn.layers[0].a_z.add_(1.0)
    assert not torch.equal(cell.arrays["a_z"], rnn.layers[0].a_z)
    twice = ParaRNN([ParaGRU(4, 4, seed=0)] * 2)
    assert twice.layers[0].a_z is not twice.layers[1].a_z
    tied = torch.nn.Parameter(cell.arrays["a_z"].clone())
    assert ParaRNN(cell.replace(a_z=tied)).layers[0].a_z is tied


def test_cells_of_numpy_are_converted_and_dtype_and_device_are_followed():
    assert ParaRNN(ParaGRU(3, 4)).layers[0].dtype is torch.float32
    assert ParaRNN(ParaGRU(3, 4, dtype=np.float64)).layers[0].dtype is torch.float64
    rnn = ParaRNN(ParaGRU(3, 4), num_layers=2, dtype=torch.bfloat16, device="cpu")
    assert {p.dtype for p in rnn.parameters()} == {torch.bfloat16}
    assert {p.device.type for p in ParaRNN(ParaGRU(3, 4), num_layers=2, device="meta").parameters()} == {"meta"}


def test_manual_seed_decides_fresh_parameters():
    torch.manual_seed(7)
    one = ParaRNN(ParaGRU(3, 4, seed=0), num_layers=2)
    torch.manual_seed(7)
    two = ParaRNN(ParaGRU(3, 4, seed=0), num_layers=2)
    assert torch.equal(one.layers[1].a_z, two.layers[1].a_z)
    before = one.layers[0].W_x.weight.clone()
    torch.manual_seed(8)
    one.reset_parameters()
    torch.manual_seed(8)
    two.reset_parameters()
    assert not torch.equal(one.layers[0].W_x.weight, before)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not one.layers[0].W_x.bias.any()


def test_O57_state_dict_deepcopy_pickle_and_torch_save():
    rnn, x = module(ParaSLSTM, 2), x_of(2, 20, 3)
    y = rnn(x)
    y.sum().backward()
    file = io.BytesIO()
    torch.save(rnn, file)
    file.seek(0)
    fresh = module(ParaSLSTM, 2)
    fresh.reset_parameters()
    fresh.load_state_dict(rnn.state_dict())
    copies = [copy.deepcopy(rnn), pickle.loads(pickle.dumps(rnn)), torch.load(file, weights_only=False), fresh]
    for other in copies:
        assert torch.equal(other(x), y)
        with torch.no_grad():
            other.layers[0].R.mul_(0.5)
        assert not torch.equal(other(x), y) and torch.equal(rnn(x), y)
    assert copy.deepcopy(rnn).last_stats.path == rnn.last_stats.path


def test_O57_outputs_follow_the_weights_whoever_sets_them():
    rnn, x = module(ParaGRU), x_of(2, 20, 3)
    optimizer = torch.optim.SGD(rnn.parameters(), lr=0.5)
    y = rnn(x)
    y.sum().backward()
    optimizer.step()
    stepped = rnn(x)
    assert not torch.equal(stepped, y)
    wanted = hidden(rnn.layers[0].cell, sequential_apply(rnn.layers[0].cell, x))
    assert worst([stepped], [wanted]) < 1e-9
    halved = {name: 0.5 * p for name, p in rnn.named_parameters()}
    called = torch.func.functional_call(rnn, halved, (x,))
    with torch.no_grad():
        for p in rnn.parameters():
            p.mul_(0.5)
    assert torch.equal(called, rnn(x))


def test_O57_parametrizations():
    rnn, x = module(ParaGRU), x_of(2, 20, 3)
    y = rnn(x)
    torch.nn.utils.parametrizations.weight_norm(rnn.layers[0].W_x, "weight")
    assert worst([rnn(x)], [y]) < 1e-9
    rnn(x).sum().backward()
    assert all(p.grad is not None for p in rnn.parameters())
    with torch.no_grad():
        rnn.layers[0].W_x.parametrizations.weight.original0.mul_(2.0)
    assert not torch.allclose(rnn(x), y)
    rnn.reset_parameters()
    assert rnn.layers[0].W_x.weight.abs().max() <= 1.0 / math.sqrt(3) + 1e-9


def test_to_a_dtype_and_back():
    rnn, x = module(ParaLSTM, dtype=torch.float32), x_of(2, 20, 3, dtype=torch.float32)
    y = rnn(x)
    for dtype in (torch.float16, torch.bfloat16):
        half = copy.deepcopy(rnn).to(dtype)
        out = half(x.to(dtype))
        assert out.dtype == dtype and torch.allclose(out.float(), y, atol=1e-2)
        out.sum().backward()
        assert half.layers[0].a_f.grad.dtype == dtype
    assert rnn.double()(x.double()).dtype == torch.float64


def test_it_prints_what_it_is():
    text = repr(module(ParaSLSTM, 2, solver="newton"))
    assert "ParaSLSTM(3, 5, max_recurrent_norm=0.5, eps=1e-06, forget_gate=" in text and "solver='newton'" in text


# --- agreement and stats ------


def test_P02_verify_agreement_takes_modules():
    rnn, x = module(ParaSLSTM, 3, config=NewtonConfig(segment_len=8)), x_of(2, 50, 3)
    report = verify_agreement(rnn, x)
    assert report.ok and set(report.slots) == {f"{k}.{s}" for k in range(3) for s in "cnmh"}
    assert report.path == "segments" and "layer" in report.worst
    holder = torch.nn.Module()
    holder.rnn = rnn
    assert verify_agreement(holder, x, reference="float64").ok
    start = [torch.ones(2, 4, 5, dtype=torch.float64)] * 3
    assert verify_agreement(rnn, x, h0=start, config=NewtonConfig(max_iters=30, residual_atol=None)).path == "per-step"
    with pytest.raises(AgreementError) as caught:
        verify_agreement(rnn, x, atol=0.0, raise_on_fail=True)
    assert not caught.value.report.ok
    with pytest.raises(ValueError, match="h0 must"):
        verify_agreement(rnn, x, h0=start[:2])
    with pytest.raises(TypeError, match="ParaRNN"):
        verify_agreement(torch.nn.Linear(2, 2), x)


def test_P03_the_first_parallel_forward_is_checked_once(monkeypatch):
    calls = []
    monkeypatch.setattr(
        "pararnn_torch.rnn.verify_layers",
        lambda *given, **options: (calls.append(given), pararnn.verify.verify_layers(*given, **options))[1],
    )
    rnn, x = module(config=NewtonConfig(verify_first_step=True)), x_of(2, 20, 3)
    rnn.eval()
    rnn(x)
    assert not calls
    rnn.train()
    rnn(x)
    rnn(x)
    assert len(calls) == 1
    rnn.reset_agreement_check()
    rnn(x)
    assert len(calls) == 2


def test_P03_a_first_forward_that_disagrees_raises_every_time():
    wrong = NewtonConfig(verify_first_step=True, max_iters=0, residual_fail=None)
    rnn = module(ParaGRU, config=wrong)
    with torch.no_grad():
        rnn.layers[0].a_n.fill_(0.5)
    for _ in range(2):
        with pytest.warns(pararnn.NotConvergedWarning), pytest.raises(AgreementError, match="first parallel forward"):
            rnn(x_of(2, 20, 3))


@pytest.mark.filterwarnings("ignore::pararnn.NotConvergedWarning")
def test_P04_P05_the_residual_warns_and_then_raises_and_nothing_reaches_the_optimiser(caplog):
    rnn, x = module(config=NewtonConfig(max_iters=0, residual_fail=None)), x_of(2, 20, 3)
    with caplog.at_level(logging.WARNING, logger="pararnn"):
        rnn(x)
    assert "newton_residual_high" in caplog.text
    rnn.config = NewtonConfig(max_iters=0, residual_fail=1e-3)
    with pytest.raises(NewtonDivergenceError):
        rnn(x)
    assert all(p.grad is None for p in rnn.parameters())


def test_P06_P54_residuals_for_a_training_log():
    rnn, x = module(ParaGRU, 3, config=NewtonConfig(max_iters=9, residual_atol=None)), x_of(2, 20, 3)
    model = torch.nn.Sequential(torch.nn.Identity(), rnn)
    assert all(math.isnan(r) for r in last_newton_residuals(model))
    log = []
    for _ in range(2):
        model(x).sum().backward()
        log.append(last_newton_residuals(torch.nn.DataParallel(model)))
    assert all(len(row) == 3 and all(isinstance(r, float) and 0.0 <= r < 1e-3 for r in row) for row in log)
    assert rnn.last_stats.max_residual == max(log[-1])
    assert unwrap_distributed(torch.nn.DataParallel(model)) is model and unwrap_distributed(model) is model


def test_P07_every_forward_carries_an_estimate():
    rnn, x = module(ParaLSTM, 2, config=NewtonConfig(segment_len=8)), x_of(2, 50, 3)
    assert rnn.last_stats is None
    for training in (True, False):
        rnn.train(training)
        rnn(x)
        stats = rnn.last_stats
        assert stats.converged and 0.0 <= stats.agreement_estimate < 1e-9 and stats.exact is not None
    assert stats.exact and stats.path == "sequential"


def test_the_last_stats_keep_no_states_alive():
    import gc
    import weakref

    rnn, x = module(ParaGRU, config=NewtonConfig(segment_len=8)), x_of(2, 50, 3)
    gone = weakref.ref(y := rnn(x))
    del y
    gc.collect()
    assert gone() is None and math.isnan(rnn.last_stats.lyapunov)


# --- names and imports ------


def test_names_that_need_torch_are_loaded_on_first_use():
    code = """
import sys, pararnn
assert "ParaRNN" in dir(pararnn) and "last_newton_residuals" in dir(pararnn.distributed)
assert "torch" not in sys.modules
from pararnn import ParaRNN
from pararnn.distributed import unwrap_distributed
assert "torch" in sys.modules
assert pararnn.ParaRNN is ParaRNN
for module, name in ((pararnn, "ParaRMM"), (pararnn.distributed, "nothing")):
    try:
        getattr(module, name)
    except AttributeError as error:
        assert name in str(error), error
    else:
        raise AssertionError(name)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_torch_they_say_what_to_install():
    code = """
import sys
sys.modules["torch"] = None
import pararnn
for load in (lambda: pararnn.ParaRNN, lambda: pararnn.distributed.last_newton_residuals):
    try:
        load()
    except ImportError as error:
        assert "pip install 'pararnn[torch]'" in str(error), error
    else:
        raise AssertionError("no error")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
