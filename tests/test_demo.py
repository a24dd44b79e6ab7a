"""The command `pararnn` and its demo: real text in, falling loss out, files saved, and errors that say what to do."""

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import pararnn
from pararnn import demo
from pararnn.cli import main
from pararnn.demo.adam import Adam, clip
from pararnn.demo.generate import generate, readable
from pararnn.demo.model import CELLS, ByteModel, cross_entropy, sum_by_symbol
from pararnn.demo.text import load_text, order_0_bits, order_1_bits
from pararnn.demo.train import spread

REPO = Path(__file__).resolve().parent.parent
# The NumPy backend is there on every machine, so what is asserted does not depend on what else is installed.
NUMPY = pararnn.NewtonConfig(scan_backend="numpy")
SMALL = {
    "steps": 12, "length": 600, "width": 16, "features": 8, "window": 128, "sample": 20, "backend": "numpy",
    "learning_rate": 0.1,
}  # fmt: skip


def command(capsys, *arguments):
    """Exit code, stdout and stderr of one command."""
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    return code, out, err


def run_python(code_or_file, *arguments, **options):
    done = subprocess.run(
        [sys.executable, *(["-c"] if not str(code_or_file).endswith(".py") else []), str(code_or_file), *arguments],
        capture_output=True, text=True, timeout=120, **options,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """One small run, and what it said."""
    said = []
    folder = tmp_path_factory.mktemp("demo") / "out"
    return demo.run(out=folder, say=said.append, **SMALL), "\n".join(said), folder


# The demo as a whole.


def test_loss_falls_and_both_runs_agree(small):
    result, _, _ = small
    assert len(result.losses) == SMALL["steps"]
    assert result.losses[0] == pytest.approx(8.0, abs=0.2), "an untrained model holds all bytes for equally likely"
    assert np.mean(result.losses[-3:]) < result.losses[0] - 1.0
    assert result.held_out_bits < result.losses[0] - 1.0
    for both in (result.fresh, result.trained):
        assert both.report.ok and both.stats.converged
        assert both.length == SMALL["length"] and both.loop_s > 0.0 and both.parallel_s > 0.0
    assert not result.interrupted and result.seconds > 0.0 and len(result.sample) == SMALL["sample"]


def test_the_account_has_all_that_was_promised(small):
    result, said, _ = small
    for wanted in (
        "One sequence of 600 steps", "time loop", "newton_apply", "steps/s", "agrees: relative error", "solver",
        f"{result.order_0:.2f} bits/byte: order-0 entropy", "step     1", "step    12", "held-out text", "A sample of",
        "saved",
    ):  # fmt: skip
        assert wanted in said, wanted
    for path in result.files.values():
        assert str(path) in said


def test_what_is_saved(small):
    result, _, folder = small
    assert {path.name for path in folder.iterdir()} == {"model.npz", "training.csv", "sample.txt", "training.png"}
    with (folder / "training.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["bits"]) for row in rows] == result.losses
    assert [row["step"] for row in rows if row["held_out_bits"]] == ["1", "10", "12"]
    assert all(int(row["passes"]) >= 1 and float(row["joint_mismatch"]) >= 0.0 for row in rows)
    assert (folder / "training.png").read_bytes().startswith(b"\x89PNG")
    model = ByteModel.load(folder / "model.npz")
    assert generate(model, 20, temperature=result.settings.temperature, seed=0) == result.sample


@pytest.mark.parametrize("cell", CELLS)
def test_every_cell_trains(cell, tmp_path):
    result = demo.run(out=tmp_path, say=lambda line: None, **{**SMALL, "cell": cell, "length": 64, "sample": 3})
    assert np.mean(result.losses[-3:]) < result.losses[0] - 1.0
    assert result.trained.report.ok


def test_same_seed_same_numbers(small, tmp_path):
    again = demo.run(out=tmp_path, say=lambda line: None, **SMALL)
    assert again.losses == small[0].losses and again.sample == small[0].sample


def test_segments_are_logged_in_training(tmp_path):
    """A window long enough for segments: the log shows their passes and what they left open."""
    result = demo.run(out=tmp_path, say=lambda line: None, **{**SMALL, "window": 4096, "steps": 2, "length": 4096})
    assert {entry.path for entry in result.log} == {"segments"}
    assert all(entry.segment_len > 1 and entry.estimate < 1e-4 for entry in result.log)


def test_ctrl_c_ends_training_and_keeps_what_was_learned(tmp_path, monkeypatch):
    original, calls = ByteModel.loss_and_gradient, []

    def until_the_user_stops(self, *arguments):
        calls.append(None)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return original(self, *arguments)

    monkeypatch.setattr(ByteModel, "loss_and_gradient", until_the_user_stops)
    said = []
    result = demo.run(out=tmp_path, say=said.append, **SMALL)
    assert result.interrupted and len(result.log) == 4
    assert any("stopped by you after 4 of 12 steps" in line for line in said)
    assert (tmp_path / "model.npz").is_file() and (tmp_path / "training.png").is_file()


def test_ctrl_c_before_the_first_step_still_saves(tmp_path, monkeypatch):
    def stopped(self, *arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(ByteModel, "loss_and_gradient", stopped)
    result = demo.run(out=tmp_path, say=lambda line: None, **SMALL)
    assert result.interrupted and result.log == [] and set(result.files) == {"model", "numbers", "sample"}


NO_MATPLOTLIB = """
import sys
class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "matplotlib":
            raise ImportError("blocked")
sys.meta_path.insert(0, Nothing())
from pararnn.cli import main
code = main(["demo", "--quick", "--steps", "2", "--length", "300", "--backend", "numpy", "--out", sys.argv[1]])
assert not any(name.partition(".")[0] == "matplotlib" for name in sys.modules)
sys.exit(code)
"""


def test_works_without_matplotlib_and_says_how_to_get_the_plot(tmp_path):
    out = run_python(NO_MATPLOTLIB, str(tmp_path))
    assert "pip install pararnn[plot]" in out
    assert {path.name for path in tmp_path.iterdir()} == {"model.npz", "training.csv", "sample.txt"}


def test_import_loads_neither_demo_nor_what_it_draws_with():
    """P20: whoever imports pararnn pays for nothing that only the command needs."""
    loaded = set(run_python("import sys, pararnn; print(*sys.modules)").split())
    assert not {"pararnn.demo", "pararnn.cli", "tqdm", "matplotlib"} & loaded
    loaded = set(run_python("import sys, pararnn.cli; print(*sys.modules)").split())
    assert not {"tqdm", "matplotlib"} & loaded


def test_a_log_gets_lines_and_a_terminal_gets_a_bar(tmp_path, capsys, monkeypatch):
    demo.run(out=tmp_path, **SMALL)
    out, err = capsys.readouterr()
    assert out.count("joint mismatch") == 2 and err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    demo.run(out=tmp_path, **SMALL)
    out, err = capsys.readouterr()
    assert "joint mismatch" not in out and "12/12" in err and "bits/byte, held out" in err


# Its parts.


@pytest.mark.parametrize("cell", CELLS)
def test_every_gradient_of_the_byte_model_is_its_finite_difference(cell):
    rng = np.random.default_rng(3)
    model = ByteModel.fresh(cell, features=3, width=4, seed=1, dtype=np.float64)
    model = model.replace({name: a + 0.3 * rng.standard_normal(a.shape) for name, a in model.arrays.items()})
    window = rng.integers(97, 105, (2, 41)).astype(np.uint8)
    _, gradient = model.loss_and_gradient(window, NUMPY)
    assert set(gradient) == set(model.arrays)
    for name, array in model.arrays.items():
        way, ends = rng.standard_normal(array.shape), []
        for small_step in (1e-5, -1e-5):
            moved = model.replace({**model.arrays, name: array + small_step * way})
            ends.append(moved.loss_and_gradient(window, NUMPY)[0] * np.log(2.0))
        assert np.sum(gradient[name] * way) == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-6, abs=1e-9), name


def test_cross_entropy_of_large_logits():
    losses, derivative = cross_entropy(np.array([[[1000.0, 0.0], [-1000.0, 1000.0]]]), np.array([[0, 0]]))
    assert losses.tolist() == [[0.0, 2000.0]]
    assert derivative.tolist() == [[[0.0, 0.0], [-1.0, 1.0]]]


def test_sum_by_symbol_is_the_plain_loop():
    rng = np.random.default_rng(0)
    symbols, rows = rng.integers(0, 256, (3, 50)), rng.standard_normal((3, 50, 2))
    expected = np.zeros((256, 2))
    for symbol, row in zip(symbols.reshape(-1), rows.reshape(-1, 2), strict=True):
        expected[symbol] += row
    np.testing.assert_allclose(sum_by_symbol(symbols, rows), expected, rtol=1e-13, atol=1e-13)


def test_bits_in_blocks_equal_bits_at_once():
    model = ByteModel.fresh("gru", features=2, width=3, seed=0)
    text = np.random.default_rng(0).integers(0, 256, (1, 20_001)).astype(np.uint8)
    at_once, _ = model.loss_and_gradient(text, NUMPY)
    assert model.evaluate(text, NUMPY) == pytest.approx(at_once, rel=1e-6)


def test_adam_finds_a_minimum_and_clip_keeps_the_direction():
    arrays, adam = {"a": np.array([3.0, -2.0])}, Adam()
    for _ in range(400):
        arrays = adam.step(arrays, {"a": 2.0 * arrays["a"]}, 0.05)
    assert np.abs(arrays["a"]).max() < 1e-2
    clipped, norm = clip({"a": np.array([3.0]), "b": np.array([[4.0]])}, 1.0)
    assert norm == 5.0 and clipped["a"][0] == pytest.approx(0.6) and clipped["b"][0, 0] == pytest.approx(0.8)


def test_text_is_the_same_every_time_and_cut_once():
    one, two = (load_text(None, needed=1000, held_out=100) for _ in range(2))
    assert np.array_equal(one.train, two.train) and np.array_equal(one.held_out, two.held_out)
    assert one.size >= 200_000 and one.held_out.size == one.size // 10
    assert b"import" in one.train.tobytes()


def test_the_lines_to_beat():
    text = np.frombuffer(b"ab" * 5000, dtype=np.uint8)
    assert order_0_bits(text) == 1.0
    assert order_1_bits(text, text) < 0.01


def test_looks_are_spread_over_all_text():
    looked = spread(np.arange(1001), 4, 100)
    assert looked.shape == (4, 101) and looked[0, 0] == 0 and looked[-1, -1] == 1000
    assert spread(np.arange(5), 4, 100).shape == (1, 5)


def test_a_sample_cannot_command_the_terminal():
    odd = "\N{REPLACEMENT CHARACTER}"
    assert readable(b"a\x1b[2J\tb\r\xff\n") == f"a{odd}[2J   b{odd}{odd}\n"


# Bad choices: one sentence, exit code 2, nothing written.


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--file", "not/there.txt"], "there is no file"),
        (["--file", "SHORT"], "the text has 9 bytes and this run needs"),
        (["--backend", "no-such"], "choose from auto"),
        (["--steps", "0"], "wanted at least 1, got 0"),
        (["--length", "many"], "wanted a whole number, got 'many'"),
        (["--cell", "transformer"], "invalid choice"),
        (["--out", "SHORT"], "cannot make the output folder"),
        (["--length", "1_000_000_000"], "give a longer text"),
    ],
)
def test_demo_refuses_before_any_work(capsys, tmp_path, monkeypatch, options, sentence):
    monkeypatch.chdir(tmp_path)
    Path("SHORT").write_text("too short")
    code, out, err = command(capsys, "demo", "--quick", *options)
    assert code == 2 and sentence in err and out == ""
    assert os.listdir() == ["SHORT"]


@pytest.mark.parametrize(
    "choice", [{"steps": 0}, {"seed": -1}, {"temperature": 0.0}, {"cell": "rnn"}, {"batch": True}, {"backend": ""}]
)
def test_run_refuses_the_same(choice):
    with pytest.raises(demo.DemoError):
        demo.run(**choice)


def test_run_names_an_unknown_setting():
    with pytest.raises(TypeError, match="no setting stepz"):
        demo.run(stepz=3)


def test_own_text(tmp_path):
    (tmp_path / "mine.txt").write_bytes(bytes(range(256)) * 8)
    said = []
    result = demo.run(file=tmp_path / "mine.txt", out=tmp_path / "out", say=said.append, **{**SMALL, "length": 2000})
    assert "mine.txt: 2,048 bytes" in said[1] and result.order_0 <= 8.0


# The other commands.


def test_version(capsys):
    assert command(capsys, "--version") == (0, f"pararnn {pararnn.__version__}\n", "")


def test_a_command_is_needed(capsys):
    code, _, err = command(capsys)
    assert code == 2 and "usage: pararnn" in err


def test_explain_prints_what_the_library_says(capsys):
    arguments = ("--time", 4096, "--width", 8, "--features", 3, "--backend", "numpy")
    code, out, _ = command(capsys, "explain", "--cell", "lstm", *arguments)
    config = pararnn.NewtonConfig(scan_backend="numpy")
    said = pararnn.explain(pararnn.ParaLSTM(3, 8), np.zeros((1, 4096, 3), dtype=np.float32), config)
    assert code == 0 and out == f"{said}\n" and "because" in out


def test_explain_needs_no_memory_for_the_input(capsys):
    """4 TB of input are asked about, not made."""
    code, out, _ = command(capsys, "explain", "--time", 10**9, "--width", 1024, "--backend", "numpy")
    assert code == 0 and "memory" in out


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_verify_says_yes(capsys, cell, dtype):
    size = ("--time", 300, "--width", 4, "--backend", "numpy")
    code, out, _ = command(capsys, "verify", "--cell", cell, "--dtype", dtype, *size)
    assert code == 0 and out.startswith("agrees: relative error") and "agreement_estimate" in out


def test_a_reader_that_stops_reading_is_no_error():
    code = "import sys; from pararnn.cli import main; sys.stdin.read(); sys.exit(main(['backends']))"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == "" and process.wait() == 1


def test_verify_says_no(capsys):
    code, out, err = command(capsys, "verify", "--time", 500, "--width", 4, "--iters", 1, "--backend", "numpy")
    assert code == 1 and out.startswith("DISAGREES") and "NotConverged" not in err


def test_verify_in_json(capsys):
    size = ("--time", 100, "--width", 4, "--batch", 2, "--backend", "numpy")
    code, out, _ = command(capsys, "verify", "--json", *size)
    found = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert code == 0 and found["report"]["ok"] is True and found["report"]["shape"] == [2, 100, 4]
    assert found["stats"]["converged"] is True and isinstance(found["stats"]["lyapunov"], float)
    assert found["parallel_seconds"] > 0.0


@pytest.mark.parametrize("name", ["verify", "explain"])
def test_an_unknown_backend_is_one_sentence(capsys, name):
    code, out, err = command(capsys, name, "--backend", "no-such")
    assert code == 2 and out == "" and err.startswith(f"pararnn {name}: ") and err.count("\n") == 1


def test_backends_lists_all_in_order_with_their_sentences(capsys, monkeypatch):
    class Absent(pararnn.Backend):
        name, priority = "absent", -5

        def probe(self):
            return "there is no such chip"

    known = {**pararnn.backends(), "absent": Absent(), "broken": "it could not be imported: ImportError: gone"}
    monkeypatch.setattr(pararnn, "backends", lambda: known)
    code, out, _ = command(capsys, "backends")
    lines = out.splitlines()
    assert code == 0 and [line.split()[0] for line in lines] == list(known)
    assert any(line.split() == ["numpy", "can", "run"] for line in lines)
    assert lines[-2].endswith("cannot run: there is no such chip") and lines[-1].endswith("ImportError: gone")


# The examples.


# What an example needs beyond NumPy, the arguments with which it is short, and what its output ends with: numbers that
# are to differ by no more than the bound given.
AGREES = r"agrees: relative error (\S+)"
EXAMPLES = {
    "decode_cuda_graph.py": (("torch", "triton"), (), r"largest difference from the time loop: (\S+)", 1e-4),
    "decode_loop.py": ((), (), r"largest difference of the state: (\S+)", 1e-6),
    "jax_quickstart.py": (("jax", "optax"), (), r"step 150: loss (\S+)", 0.5),
    "numpy_quickstart.py": ((), (), AGREES, 1e-4),
    "own_cell.py": ((), (), AGREES, 1e-4),
    "recurrent_state_loop.py": (("torch",), (), r"rollout 100: .* differ by (\S+)", 1e-5),
    "rwkv6_text.py": (("jax",), ("--steps", "4"), r"from chunk to subchunk, loss of one batch (\S+) and (\S+)", 1e-5),
    "stock_gru_task.py": (
        ("torch", "sklearn", "matplotlib", "tqdm"), ("--steps", "2", "--digits", "40"), AGREES, 1e-4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("example", sorted((REPO / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_run(example, tmp_path):
    needs, arguments, sentence, bound = EXAMPLES[example.name]
    for library in needs:
        pytest.importorskip(library)
    if example.name == "decode_cuda_graph.py" and not __import__("torch").cuda.is_available():
        pytest.skip("no CUDA card")
    found = re.search(sentence, run_python(example, *arguments, cwd=tmp_path))
    assert found, "the output lacks its last line"
    numbers = [float(n.rstrip(",")) for n in found.groups()]
    apart = numbers[0] if len(numbers) == 1 else abs(numbers[0] - numbers[1])
    assert apart <= bound


def test_own_cell_has_the_right_gradient(tmp_path):
    words = run_python(REPO / "examples/own_cell.py", cwd=tmp_path).splitlines()[-1].split()
    assert float(words[1].rstrip(",")) == pytest.approx(float(words[-1]), rel=1e-6)
