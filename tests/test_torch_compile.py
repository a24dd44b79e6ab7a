"""torch.compile: one graph for every length, the results and gradients of eager, forward and backward (O61, P40)."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import _dynamo  # noqa: E402
from torch.func import vmap  # noqa: E402

from pararnn import (  # noqa: E402
    ChannelwiseCell,
    NewtonConfig,
    ParaGRU,
    ParaLSTM,
    ParaRNN,
    ParaSLSTM,
    compile_safe_config,
    newton_apply,
    sequential_apply,
)
from pararnn_torch.text import cell_text, config_text, read_cell, read_config  # noqa: E402
from support import CELLS  # noqa: E402
from torch_support import worst  # noqa: E402

SAFE = compile_safe_config()
# Three iterations are an order here, and eager says where they do not suffice.
pytestmark = pytest.mark.filterwarnings("ignore::pararnn.NotConvergedWarning")


@pytest.fixture(autouse=True)
def graphs():
    """Starts each test without compiled code; gives the number of graphs compiled since."""
    _dynamo.reset()
    _dynamo.utils.counters.clear()
    yield lambda: _dynamo.utils.counters["stats"]["unique_graphs"]
    _dynamo.reset()


def compiled(f, **options):
    return torch.compile(f, fullgraph=True, **{"backend": "aot_eager", **options})


def x_of(time, *, features=3, seed=0, dtype=torch.float32):
    return torch.randn(2, time, features, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_P40_the_snippet_of_the_FAQ():
    cell, z = ParaGRU(3, 4, dtype=torch.float32, seed=0), x_of(50)
    run = torch.compile(lambda z: newton_apply(cell, z, compile_safe_config(scan_backend="auto")), fullgraph=True)
    assert worst([run(z)], [sequential_apply(cell, z)]) < 1e-4


def test_dynamic_lengths_compile_once_more_and_never_again(graphs):
    cell = ParaLSTM(3, 4, dtype=torch.float32, seed=0)
    run = compiled(lambda z: newton_apply(cell, z, SAFE))
    for time in (*range(2, 18), 100):
        assert worst([run(x_of(time))], [newton_apply(cell, x_of(time), SAFE)]) < 1e-6
    assert graphs() == 2


def test_O61_lengths_of_a_single_step_and_marked_as_dynamic(graphs):
    cell = ParaGRU(3, 4, dtype=torch.float32, seed=0)
    run = compiled(lambda z: newton_apply(cell, z, SAFE), dynamic=True)
    for time in (5, 1, 9, 33):
        assert worst([run(x_of(time))], [newton_apply(cell, x_of(time), SAFE)]) < 1e-6
    assert graphs() <= 2


@pytest.mark.parametrize("kind", CELLS)
def test_O61_a_module_and_its_gradients(kind, graphs):
    torch.manual_seed(0)
    rnn = ParaRNN(kind(3, 4, seed=0), num_layers=2, config=SAFE, return_hidden=True)
    run = compiled(rnn)
    start = [0.1 * torch.ones(2, *rnn.layers[0].kind.state_shape) for _ in range(2)]
    for time in (4, 7, 12, 20):
        x = x_of(time).requires_grad_()
        inputs = [x, *(h.requires_grad_() for h in start), *rnn.parameters()]
        outs = [f(x, start) for f in (run, rnn)]
        assert worst(outs[0], outs[1]) < 1e-5
        found, wanted = (torch.autograd.grad(y.square().sum() + h.sum(), inputs) for y, h in outs)
        assert worst(found, wanted) < 1e-4
    assert graphs() == 2


def test_inductor_forward_and_backward(graphs):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 3), ParaRNN(ParaGRU(3, 4, seed=0), config=SAFE), torch.nn.Linear(4, 2)
    )
    run = torch.compile(model, fullgraph=True)
    for time in (6, 9, 31):
        found, wanted = (torch.autograd.grad(f(x_of(time)).square().sum(), [*model.parameters()]) for f in (run, model))
        assert worst(found, wanted) < 1e-4
    assert graphs() == 2


def test_weights_that_change_are_followed_without_compiling_again(graphs):
    torch.manual_seed(0)
    rnn = ParaRNN(ParaGRU(3, 4, seed=0), config=SAFE)
    run, x = compiled(rnn), x_of(10)
    before = run(x)
    optimizer = torch.optim.SGD(rnn.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        run(x).square().sum().backward()
        optimizer.step()
    assert not torch.equal(run(x), before) and worst([run(x)], [rnn(x)]) < 1e-6
    assert graphs() == 1


def test_the_default_solver_and_recompute_run_inside_too():
    torch.manual_seed(0)
    for config in (NewtonConfig(), NewtonConfig(segment_len=8, recompute=True), NewtonConfig(newton_iters_by_t={1: 4})):
        rnn = ParaRNN(ParaSLSTM(3, 4, seed=0, dtype=torch.float64), config=config)
        x = x_of(40, dtype=torch.float64)
        found, wanted = (torch.autograd.grad(f(x).square().sum(), [*rnn.parameters()]) for f in (compiled(rnn), rnn))
        assert worst(found, wanted) < 1e-9


def test_evaluation_mode_is_one_graph_for_every_length(graphs):
    rnn = ParaRNN(ParaLSTM(3, 4, seed=0), num_layers=2).eval()
    run = compiled(rnn)
    for time in (4, 40, 400):
        assert worst([run(x_of(time))], [rnn(x_of(time))]) < 1e-5
    assert graphs() == 2 and rnn.last_stats.path == "sequential"
    cell = rnn.layers[0].cell
    loop = compiled(lambda x: sequential_apply(cell, x))
    assert worst([loop(x_of(9))], [sequential_apply(cell, x_of(9))]) < 1e-6


def test_P06_stats_are_known_after_a_compiled_call_as_well():
    rnn = ParaRNN(ParaGRU(3, 4, seed=0), config=SAFE)
    run = compiled(rnn)
    run(x_of(30))
    first = rnn.last_stats
    assert first.iters == 3 and 0.0 <= first.max_residual < 1e-3
    run(3.0 * x_of(30))
    assert rnn.last_stats is not first and rnn.last_stats.residual_history != first.residual_history


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_P41_autocast_inside_and_outside(dtype):
    torch.manual_seed(0)
    rnn = ParaRNN(ParaGRU(3, 4, seed=0), config=SAFE)
    x = x_of(20)
    wanted = [y := rnn(x), *torch.autograd.grad(y.square().sum(), [*rnn.parameters()])]

    def inside(x):
        with torch.autocast("cpu", dtype):
            return rnn(x)

    with torch.autocast("cpu", dtype):
        outer = compiled(rnn)(x)
    for y in (outer, compiled(inside)(x)):
        assert y.dtype == torch.float32
        assert worst([y, *torch.autograd.grad(y.square().sum(), [*rnn.parameters()])], wanted) < 1e-5
    with torch.autocast("cpu", dtype):
        assert compiled(rnn)(x.to(dtype)).dtype == torch.float32


def test_O61_half_precision_module():
    rnn = ParaRNN(ParaGRU(3, 4, seed=0), config=SAFE).to(torch.bfloat16)
    x = x_of(20, dtype=torch.bfloat16)
    assert torch.equal(compiled(rnn)(x), rnn(x))


def test_O61_outputs_survive_the_next_call():
    rnn = ParaRNN(ParaGRU(3, 4, seed=0), config=SAFE)
    run = torch.compile(rnn, mode="reduce-overhead")
    kept = [run(k * x_of(12)) for k in (1.0, 2.0, 3.0)]
    assert worst(kept, [rnn(k * x_of(12)) for k in (1.0, 2.0, 3.0)]) < 1e-5


def test_O50_vmap_inside():
    cell = ParaGRU(3, 4, dtype=torch.float32, seed=0)
    xs = torch.stack([x_of(6, seed=n) for n in range(3)])
    found = compiled(lambda xs: vmap(lambda x: newton_apply(cell, x, SAFE))(xs))(xs)
    assert worst([found], [torch.stack([newton_apply(cell, x, SAFE) for x in xs])]) < 1e-6


def test_export_with_a_dynamic_length():
    rnn = ParaRNN(ParaLSTM(3, 4, seed=0), config=SAFE)
    program = torch.export.export(rnn, (x_of(10),), dynamic_shapes=({1: torch.export.Dim("T", min=2, max=1000)},))
    assert worst([program.module()(x_of(77))], [rnn(x_of(77))]) < 1e-6


def test_a_second_derivative_is_refused_here_as_well():
    cell = ParaGRU(3, 4, dtype=torch.float32, seed=0)
    x = x_of(5).requires_grad_()
    y = compiled(lambda z: newton_apply(cell, z, SAFE))(x)
    with pytest.raises(RuntimeError):
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        torch.autograd.grad(first.sum(), x)


def test_bad_input_is_refused_with_the_usual_sentence():
    cell = ParaGRU(3, 4, dtype=torch.float32, seed=0)
    for x, sentence in ((x_of(5, features=4), "takes 3 features"), (x_of(5)[0], "3 axes")):
        _dynamo.reset()
        with pytest.raises(Exception, match=sentence):
            compiled(lambda z: newton_apply(cell, z, SAFE))(x)


def test_the_custom_operators_pass_torch_s_own_checks():
    cell = ParaLSTM(3, 4, dtype=torch.float64, seed=0)
    arrays = [a.requires_grad_() for a in cell.arrays.values()]
    x, h0 = x_of(6, dtype=torch.float64).requires_grad_(), 0.1 * torch.ones(2, 2, 4, dtype=torch.float64)
    texts = (cell_text(cell, cell.arrays), config_text(NewtonConfig(segment_len=3)))
    given = (x, h0.requires_grad_(), None, arrays, *texts, "", None, None, None)
    torch.library.opcheck(torch.ops.pararnn.solve.default, given)
    states = newton_apply(cell, x, h0=h0).detach()
    still = [a.detach() for a in arrays]
    given = (torch.ones_like(states), states, x.detach(), h0.detach(), None, still, *texts, None, None, None)
    torch.library.opcheck(torch.ops.pararnn.pull_back.default, given)


# --- cells and configurations as text ------


def test_a_configuration_survives_its_text():
    for config in (
        NewtonConfig(),
        SAFE,
        NewtonConfig(newton_iters_by_t={4: 2, 16: 3}, tol=1e-7, scan_backend="torch", recompute=True),
        NewtonConfig(max_iters=2, residual_atol=None, residual_fail=0.5, omega=0.9, jac_structure="diag"),
    ):
        assert read_config(config_text(config)) == config


def test_a_cell_s_kind_survives_its_text_even_where_two_classes_share_a_name():
    def define(factor):
        class Mine(ChannelwiseCell):
            slots, gates, params, options = ("h",), ("u",), ("a",), ("scale",)

            def __init__(self, *sizes, scale=1.0, **keywords):
                self.__dict__["scale"] = scale
                super().__init__(*sizes, **keywords)

            def step(self, xp, h, u, a):
                return (factor * self.scale * xp.tanh(a * h + u),)

        return Mine

    kinds = [define(0.5), define(0.25)]
    for kind in kinds:
        cell = kind(3, 4, dtype=torch.float32, scale=float("inf"), max_recurrent_norm=None)
        blank, names = read_cell(cell_text(cell, cell.arrays))
        assert type(blank) is kind and blank.scale == float("inf") and blank.max_recurrent_norm is None
        assert names == tuple(cell.arrays) and (blank.d_in, blank.d_h) == (3, 4) and not blank.arrays
    for kind in kinds:
        cell = kind(3, 4, dtype=torch.float32, seed=0)
        run = compiled(lambda z, cell=cell: newton_apply(cell, z, SAFE))
        assert worst([run(x_of(9))], [sequential_apply(cell, x_of(9))]) < 1e-5


def test_an_option_that_is_no_plain_value_is_refused():
    class Odd(ChannelwiseCell):
        slots, gates, options = ("h",), ("u",), ("table",)

        def step(self, xp, h, u):
            return (h + u,)

    cell = Odd(3, 4, dtype=torch.float32)
    cell.__dict__["table"] = object()
    with pytest.raises(TypeError, match="plain numbers"):
        read_cell(cell_text(cell, cell.arrays))
