"""The command line: `python -m mpx doctor`, `explain`, `forecast` and `blame`."""

import argparse
import ast
import contextlib
import importlib
import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ._autocast import autocast
from ._base.errors import describe
from ._tools._blame import BlameReport
from ._tools._doctor import text as text_of_doctor
from ._tools._inspect import explain

_EXPLAIN = """\
Report every operation of a function and its precision, without running it:

  python -m mpx explain train:loss ":make_model()" f32[8,16] --dtype bfloat16

Arguments of the function are written as

  f32[8,16], bf16[], int32[8], key[]  an array of that dtype and shape
  module:name, :name                  an object of a module, or of that one
  module:name(), :name()              what it returns, as shapes
  3, 2.5, True, None, 'text'          a literal of Python
  name=...                            a keyword argument
"""
_FORECAST = """\
Estimate what a training step needs and gains on a device that is not here:

  python -m mpx forecast train:loss ":make_model()" f32[256,32,32,3] i32[256] \\
      --optimizer adamw --target h100 --precision bfloat16 --precision delayed

The function is a loss, or without --optimizer a whole step. Arguments are written as
for `explain`. The target's compiler must be installed: "jax[cuda12]" or libtpu.
"""
_BLAME = """\
Print what made a step non-finite:

  python -m mpx blame train:replay 812 runs/gpt --save step_812.html

The function restores the step, and returns the report of `mpx.blame`:

  def replay(step, folder):
      model, scaling, batch = ...
      return mpx.blame(loss, scaling)(model, batch)

It is called with the arguments: Python literals, other text unchanged.
"""
_DOCTOR = """\
List versions and devices, the precision that is fast on them, and problems such as the
published MPX or JAX without its plugin.
"""

_ARRAY = re.compile(r"(?P<dtype>\w+)\[(?P<shape>[\d, ]*)\]")
_OBJECT = re.compile(r"(?P<module>[\w.]*):(?P<name>[\w.]+)(?P<call>\(\))?")
_KEYWORD = re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<value>.+)", re.DOTALL)
_SHORT = (
    ("bf", "bfloat"),
    ("f", "float"),
    ("i", "int"),
    ("u", "uint"),
    ("c", "complex"),
)


class _RefusedError(ValueError):
    """An argument of the command line is invalid."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line; `sys.argv` if no arguments are given."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except options.refused as error:
        parser.error(str(error))


def _explain(options: argparse.Namespace) -> None:
    func = _read_object(options.function, "")
    module = options.function.partition(":")[0]
    positional, keywords = _read_arguments(options.arguments, module)
    if options.dtype is not None:
        func = autocast(func, options.dtype)
    if options.grad:
        func = eqx.filter_grad(func)
    report = explain(func)(*positional, **keywords)
    report.show(options.limit or None, options.width or None)
    _save(report, options.save)


def _forecast(options: argparse.Namespace) -> None:
    # No device is needed, so JAX must not look for one.
    jax.config.update("jax_platforms", "cpu")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL") == "1":  # JAX's default
        # XLA warns of every program that does not fit.
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    from ._tools._forecast import forecast

    func = _read_object(options.function, "")
    module = options.function.partition(":")[0]
    positional, keywords = _read_arguments(options.arguments, module)
    asked = forecast(
        func,
        _read_optimizer(options.optimizer, module),
        targets=options.target or ("h100",),
        precisions=options.precision or ("float32", "bfloat16", "delayed"),
        has_aux=options.has_aux,
        largest_batch=options.largest_batch,
        top=options.top,
    )
    try:
        with _progress("mpx.forecast"):
            report = asked(*positional, **keywords)
    except TypeError as error:
        if "has_aux=True" not in str(error):
            raise
        raise _RefusedError(f"{error} Here: --has-aux.") from None
    print(report)
    _save(report, options.save)


@contextlib.contextmanager
def _progress(name: str) -> Iterator[None]:
    """Prints a logger's progress to standard error."""
    logger, handler = logging.getLogger(name), logging.StreamHandler()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def _read_optimizer(text: str | None, module: str) -> object:
    """Returns an optimizer of Optax with a learning rate of 1e-3, or an object."""
    if text is None or ":" in text:
        return None if text is None else _read_object(text, module)
    import optax

    if not hasattr(optax, text):
        raise ValueError(f"Optax has no optimizer {text!r}; pass module:name for yours")
    return getattr(optax, text)(1e-3)


def _blame(options: argparse.Namespace) -> None:
    func = _read_object(options.function, "")
    if not callable(func):
        raise _RefusedError(f"{options.function!r} is not a function")
    report = func(*map(_read_literal, options.arguments))
    if not isinstance(report, BlameReport):
        raise _RefusedError(
            f"{options.function!r} must return the report of `mpx.blame(loss, "
            f"scaling)(model, batch)`; got {describe(report)}"
        )
    print(report)
    _save(report, options.save)


def _save(report: Any, paths: Sequence[str]) -> None:
    for path in paths:
        report.save(path)
        print(f"\nWritten: {path}")


def _read_literal(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mpx", description="Mixed and low precision training for JAX."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    raw = argparse.RawDescriptionHelpFormatter
    help_of_doctor = "versions, devices, which precision is fast here"
    doctor = commands.add_parser("doctor", help=help_of_doctor, description=_DOCTOR)
    doctor.set_defaults(run=lambda _: print(text_of_doctor()), refused=_RefusedError)
    help_of_explain = "report every operation of a function, without running it"
    explain = commands.add_parser(
        "explain", help=help_of_explain, description=_EXPLAIN, formatter_class=raw
    )
    explain.set_defaults(run=_explain, refused=ValueError)
    help_of_blame = "print what made a step non-finite; your function restores it"
    blame = commands.add_parser(
        "blame", help=help_of_blame, description=_BLAME, formatter_class=raw
    )
    help_of_forecast = "estimate a step's needs and gains on a device that is not here"
    forecast = commands.add_parser(
        "forecast", help=help_of_forecast, description=_FORECAST, formatter_class=raw
    )
    forecast.set_defaults(run=_forecast, refused=(ValueError, RuntimeError))
    # Errors of the function that restores the step are the user's.
    blame.set_defaults(run=_blame, refused=_RefusedError)
    for command in (explain, blame, forecast):
        command.add_argument("function", metavar="module:function")
        command.add_argument("arguments", nargs="*", metavar="argument")
        command.add_argument(
            "--save",
            action="append",
            default=[],
            metavar="PATH",
            type=_report_path,
            help="also write the report: .html, .json or .txt; may be repeated",
        )
    explain.add_argument(
        "--dtype", help="explain mpx.autocast(function, DTYPE): bfloat16 or float16"
    )
    explain.add_argument(
        "--grad",
        action="store_true",
        help="explain the gradient for the first argument",
    )
    explain.add_argument(
        "--limit", type=int, default=30, help="lines to print; 0 for all (default: 30)"
    )
    explain.add_argument(
        "--width",
        type=int,
        default=0,
        help="columns to print; 180 and more show all (default: the terminal's)",
    )
    _add_forecast_options(forecast)
    return parser


def _add_forecast_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--optimizer", help="a name of Optax, or module:name; omit it for a whole step"
    )
    for name, words in (
        ("target", "h100, b200, tpu-v5e, ... (default: h100)"),
        ("precision", "bfloat16, delayed, ... (default: float32, bfloat16, delayed)"),
    ):
        again = f"{words}; may be repeated"
        command.add_argument(f"--{name}", action="append", default=[], help=again)
    command.add_argument(
        "--has-aux", action="store_true", help="the loss returns a pair, (loss, aux)"
    )
    command.add_argument(
        "--largest-batch", action="store_true", help="search for the largest that fits"
    )
    command.add_argument(
        "--top", type=int, default=10, help="kernels to list (default: 10)"
    )


def _report_path(text: str) -> str:
    """Returns a path that a report can be written to; raises before the work starts."""
    path = Path(text)
    if path.suffix not in (".html", ".json", ".txt", ".svg"):
        raise argparse.ArgumentTypeError(
            f"{text!r} must end with .html, .json or .txt (or .svg for a forecast)"
        )
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"no such folder: {str(path.parent)!r}")
    return text


def _read_arguments(
    texts: Sequence[str], module: str
) -> tuple[list[object], dict[str, object]]:
    positional: list[object] = []
    keywords: dict[str, object] = {}
    for text in texts:
        keyword = _KEYWORD.fullmatch(text)
        if keyword:
            keywords[keyword["name"]] = _read_argument(keyword["value"], module)
        else:
            positional.append(_read_argument(text, module))
    return positional, keywords


def _read_argument(text: str, module: str) -> object:
    array = _ARRAY.fullmatch(text)
    if array:
        shape = tuple(int(size) for size in array["shape"].split(",") if size.strip())
        return jax.ShapeDtypeStruct(shape, _read_dtype(array["dtype"]))
    if _OBJECT.fullmatch(text):
        return _read_object(text, module)
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        raise _RefusedError(
            f"an argument must be an array such as f32[8,16], an object such as "
            f"module:name or :make_model(), or a literal; got {text!r}"
        ) from None


def _read_dtype(name: str) -> Any:
    if name == "key":
        return jax.eval_shape(lambda: jax.random.key(0)).dtype
    for short, long in _SHORT:
        if re.fullmatch(rf"{short}\d+", name):
            name = name.replace(short, long, 1)
            break
    try:
        return jnp.dtype(name)
    except TypeError:
        raise _RefusedError(
            f"{name!r} is not a dtype; use one of JAX's, or f32, bf16, i8, ..."
        ) from None


def _read_object(text: str, module: str) -> Any:
    parts = _OBJECT.fullmatch(text)
    if parts is None:
        raise _RefusedError(f"a function must be module:function; got {text!r}")
    name = parts["module"] or module
    try:
        found: Any = importlib.import_module(name)
        for attribute in parts["name"].split("."):
            found = getattr(found, attribute)
    except (ImportError, AttributeError) as error:
        raise _RefusedError(f"{text!r} cannot be read: {error}") from None
    return eqx.filter_eval_shape(found) if parts["call"] else found


if __name__ == "__main__":
    main(sys.argv[1:])
