"""The command line."""

import json
import os
import re
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import mpx
from mpx.__main__ import main
from mpx._quantize import Target, target_from
from mpx._tools import _doctor


def model() -> eqx.nn.MLP:
    return eqx.nn.MLP(16, 4, 8, 1, key=jax.random.key(0))


def loss(model, x, scale=1.0, *, key=None):
    if key is not None:
        x = x + jax.random.normal(key, x.shape, x.dtype)
    return scale * jnp.sum(jax.vmap(model)(x))


def replay(step, folder):
    assert (step, folder) == (812, "runs/gpt")
    w, x = jnp.ones((4, 2)), jnp.zeros((3, 4))
    loss = mpx.autocast(lambda w: jnp.sum(jnp.log(x) @ w))
    return mpx.blame(loss, mpx.NoLossScaling())(w)


HERE = f"{__name__}:loss"
X = jax.ShapeDtypeStruct((2, 16), jnp.float32)


def saved(tmp_path, *arguments):
    path = tmp_path / "report.json"
    main(["explain", HERE, ":model()", *arguments, "--save", str(path)])
    return mpx.reports.Report.from_json(path.read_text())


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    # pytest imports this file under a name that it does not put in sys.modules.
    module = type(sys)(__name__)
    module.loss, module.model, module.replay = loss, model, replay
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or module)


def test_explain_prints_and_saves(tmp_path, capsys):
    report = saved(tmp_path, "f32[2,16]")
    assert report == mpx.explain(loss)(eqx.filter_eval_shape(model), X)
    out = capsys.readouterr().out
    assert "dot_general" in out and "Written: " in out


def test_explain_takes_options(tmp_path):
    shapes = eqx.filter_eval_shape(model)
    report = saved(tmp_path, "f32[2,16]", "--dtype", "bf16", "--grad")
    assert report == mpx.explain(eqx.filter_grad(mpx.autocast(loss)))(shapes, X)
    assert report.totals.half_flops_share > 0.8


def test_blame_prints_and_saves(tmp_path, capsys):
    page = tmp_path / "step.html"
    main(["blame", f"{__name__}:replay", "812", "runs/gpt", "--save", str(page)])
    out = capsys.readouterr().out
    assert "the logarithm of zero" in out and f"Written: {page}" in out
    assert "the logarithm of zero" in page.read_text()


def test_an_error_of_what_restores_a_step_is_left_as_it_is(monkeypatch):
    def broken(step):
        raise ValueError("no such step")

    monkeypatch.setattr(sys.modules[__name__], "replay", broken)
    with pytest.raises(ValueError, match="no such step"):
        main(["blame", f"{__name__}:replay", "812"])


def test_explain_takes_literals_and_keywords(tmp_path):
    report = saved(tmp_path, "float32[2, 16]", "2.0", "key=key[]")
    names = {operation.primitive for operation in report.operations}
    assert {"random_bits", "dot_general"} <= names


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["explain", "loss"], "a function must be module:function; got 'loss'"),
        (["explain", "nowhere:loss"], "'nowhere:loss' cannot be read: No module"),
        (["explain", "jax.numpy:nothing"], "cannot be read: .*nothing"),
        (["explain", HERE, "g32[2]"], "'g32' is not a dtype"),
        (["explain", HERE, "f32[2,x]"], "an argument must be an array such as f32"),
        (["blame", HERE, "--save", "x.md"], "'x.md' must end with .html, .json"),
        (["blame", HERE, "--save", "nowhere/x.txt"], "no such folder: 'nowhere'"),
        (["blame", "replay"], "a function must be module:function; got 'replay'"),
        (["blame", "jax.numpy:pi"], "'jax.numpy:pi' is not a function"),
        (["blame", "jax.numpy:sqrt", "4"], "must return the report of `mpx.blame"),
        ([], "COMMAND"),
    ],
)
def test_wrong_input_is_refused(arguments, match, capsys):
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert re.search(match, capsys.readouterr().err)


def test_it_runs_as_a_module(tmp_path):
    path = tmp_path / "report.json"
    command = [
        sys.executable, "-m", "mpx", "explain", "jax.numpy:matmul",
        "f32[2,4]", "f32[4,3]", "--save", str(path),
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "48" in result.stdout
    assert json.loads(path.read_text())["totals"]["flops"] == 48


@pytest.mark.parametrize("arguments", [[], ["explain"], ["blame"], ["doctor"]])
def test_help_fits_a_terminal(arguments, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([*arguments, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) <= 40


def test_doctor_says_what_is_here(capsys):
    main(["doctor"])
    out = capsys.readouterr().out
    assert f"jax {jax.__version__}" in out and "equinox " in out
    assert f"{jax.device_count()} x cpu" in out
    assert max(map(len, out.splitlines())) <= 88


@pytest.mark.parametrize(
    ("name", "fast"),
    [
        ("cpu", []),
        ("cpu bf16", ["bfloat16"]),
        ("v100", ["float16"]),
        ("a100", ["float16", "bfloat16"]),
        ("h100", ["float16", "bfloat16", "FP8"]),
        ("b200", ["float16", "bfloat16", "FP8", "MXFP8, NVFP4"]),
        ("tpu v5e", ["bfloat16"]),
        ("tpu7x", ["bfloat16", "FP8"]),
    ],
)
def test_doctor_knows_which_precision_is_fast(name, fast):
    found = _doctor.precisions(target_from(name))
    assert [precision.name for precision in found if precision.is_fast] == fast


def test_doctor_does_not_judge_what_it_does_not_know():
    found = _doctor.precisions(Target("rocm", "gfx942"))
    assert {precision.is_fast for precision in found} == {None}


def test_doctor_says_that_jax_does_not_start(monkeypatch, capsys):
    def devices():
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(jax, "devices", devices)
    main(["doctor"])
    out = capsys.readouterr().out
    assert "JAX finds no device: Unable to initialize backend 'cuda'" in out
    assert f"jax {jax.__version__}" in out


def test_doctor_finds_what_is_in_the_way(monkeypatch):
    devices = jax.devices()
    monkeypatch.setattr(jax, "__version__", "0.10.2")
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert _doctor.find_problems(devices) == []
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(jax, "__version__", "0.12.0")
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.1.8")
    published, driver, sums = _doctor.find_problems(devices)
    assert "mixed-precision-for-JAX 0.1.8 is installed" in published
    assert 'pip install "jax[cuda12]"' in driver
    assert "export XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type=" in sums


@pytest.mark.third_party
def test_forecast_asks_for_the_compiler_and_prints_the_report(monkeypatch, capsys):
    from mpx._tools._forecast import _steps

    words = [
        "forecast",
        "tests.tools.test_main:mean_square",
        "f32[64,32]",
        "f32[16,64]",
    ]
    words += ["--optimizer", "adam", "--target", "tpu-v5e", "--precision", "bfloat16"]
    few = lambda target, count=1: jax.devices("cpu")[:count]  # noqa: E731
    monkeypatch.setattr(_steps, "compile_only_devices", few)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "1")

    def refused(*words):
        with pytest.raises(SystemExit):
            main([*words])
        return capsys.readouterr().err

    main(words)
    assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == "2"
    printed, progress = capsys.readouterr()
    assert "mean_square: forecast" in printed and "v5e, bfloat16" in printed
    assert progress == "Compiling bfloat16 for TPU v5e, batch 16\n"
    words[1] = "tests.tools.test_main:mean_square_and_sum"
    assert "set `has_aux=True`. Here: --has-aux." in refused(*words)
    main([*words, "--has-aux"])
    assert "mean_square_and_sum: forecast" in capsys.readouterr().out
    found = refused(*words, "--optimizer", "no_such_one")
    assert "no optimizer 'no_such_one'" in found
    assert "got 'a100'" in refused(*words, "--target", "a100")


def mean_square(w, x):
    return jnp.mean((x @ w) ** 2)


def mean_square_and_sum(w, x):
    return mean_square(w, x), jnp.sum(x)
