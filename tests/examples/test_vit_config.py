"""The command lines of the ViT examples."""

import dataclasses
from pathlib import Path

import pytest

from examples import vit_explicit
from examples.runs import SetupError
from examples.vit import PRESETS, parse_config


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_valid_and_fields_override(preset):
    assert parse_config(["--preset", preset]) == PRESETS[preset]
    config = parse_config(
        f"--precision bfloat16 --preset={preset} --steps 7 --batch-size 32 "
        "--accumulate 4 --clip 0.5 --seed 3 --data-path there --run-dir here "
        "--learning-rate 0.01 --resume --model.width 96 --scaling.period 5".split()
    )
    expected = dataclasses.replace(
        PRESETS[preset],
        precision="bfloat16",
        steps=7,
        batch_size=32,
        accumulate=4,
        clip=0.5,
        seed=3,
        data_path=Path("there"),
        run_dir=Path("here"),
        learning_rate=0.01,
        resume=True,
        model=dataclasses.replace(PRESETS[preset].model, width=96),
        scaling=dataclasses.replace(PRESETS[preset].scaling, period=5),
    )
    assert config == expected


def test_default_is_digits_in_all_precisions():
    config = parse_config([])
    assert config.preset == "digits"
    assert config.precisions == ("float32", "float16", "bfloat16")
    assert config.folder == Path("runs/digits")
    explicit = vit_explicit.parse_config([])
    assert explicit == dataclasses.replace(config, style="explicit")
    assert explicit.folder == Path("runs/digits-explicit")


def test_paper_sizes():
    desktop, base = PRESETS["cifar100"].model, PRESETS["imagenet"].model
    sizes = ("patch", "width", "hidden", "blocks", "heads")
    assert [getattr(desktop, s) for s in sizes] == [4, 256, 800, 12, 4]
    assert [getattr(base, s) for s in sizes] == [16, 768, 3072, 12, 12]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--steps 0", r"`--steps` must be at least 1; got 0"),
        ("--batch-size 0", r"`--batch-size` must be at least 1"),
        ("--accumulate 3", r"`--accumulate` must divide --batch-size 64; got 3"),
        ("--clip 0", r"`--clip` must be positive; got 0"),
        ("--learning-rate -1", r"`--learning-rate` must be positive"),
        ("--fold 5", r"`--fold` must be 0, 1, 2, 3 or 4; got 5"),
        ("--model.heads 5", r"`--model.heads` must divide --model.width 64; got 5"),
        ("--scaling.period 0", r"`--scaling\.\*`: `period` of .* got 0"),
        ("--model.dropout 1", r"`--model.dropout` must lie in \[0, 1\); got 1"),
    ],
)
def test_wrong_options_are_named(arguments, message):
    with pytest.raises(SetupError, match=message):
        parse_config(arguments.split())


@pytest.mark.parametrize(
    "arguments", ["--preset mnist", "--precision int8", "--style magic"]
)
def test_unknown_choices_exit(arguments, capsys):
    with pytest.raises(SystemExit):
        parse_config(arguments.split())
    assert arguments.split()[1] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("parse", "arguments", "message"),
    [
        (
            parse_config,
            "--style explicit",
            r"`--style` must be autocast here, see examples\.vit_explicit; got",
        ),
        (
            vit_explicit.parse_config,
            "--style autocast",
            r"`--style` must be explicit here, see examples\.vit; got",
        ),
        (
            vit_explicit.parse_config,
            "--recipe mxfp8",
            r"`--recipe` is for examples\.vit, which casts by autocast; got",
        ),
    ],
)
def test_each_script_has_one_style(parse, arguments, message):
    with pytest.raises(SetupError, match=message):
        parse(arguments.split())
