"""The data sets of the ViT example, on small files made here."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from examples.data.cifar100 import RECORD_BYTES
from examples.data.pipeline import batches, random_mirror, random_shift
from examples.runs import SetupError
from examples.vit import PRESETS, load_data


def config_of(preset: str, path: Path | None = None, **changes):
    changes = {"batch_size": 4, **changes}
    return dataclasses.replace(PRESETS[preset], data_path=path, **changes)


def assert_batches_equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name])


# --- Order ---------------------------------------------------------------------------


def test_batch_is_a_function_of_seed_and_position():
    first = load_data(config_of("digits", batch_size=100)).train
    again = load_data(config_of("digits", batch_size=100)).train
    other = load_data(config_of("digits", batch_size=100, seed=1)).train
    continued = batches(first, workers=3, start=16)
    for position in range(16, 20):  # past the end of the first pass
        assert_batches_equal(first[position], again[position])
        assert_batches_equal(first[position], next(continued))
    assert (first[0]["label"] != other[0]["label"]).any()


def test_every_pass_sees_every_image_once_in_a_new_order():
    data = load_data(config_of("digits", batch_size=479))  # 1,437 = 3 * 479
    passes = [
        np.concatenate([data.train[3 * p + i]["label"] for i in range(3)])
        for p in range(2)
    ]
    np.testing.assert_array_equal(np.sort(passes[0]), np.sort(passes[1]))
    assert (passes[0] != passes[1]).any()


def test_last_test_batch_is_padded():
    data = load_data(config_of("digits", batch_size=128))
    labels = [batch["label"] for batch in batches(data.test)]
    assert [len(label) for label in labels] == [128, 128, 128]
    assert sum(int((label >= 0).sum()) for label in labels) == data.test_size == 360


# --- Augmentation --------------------------------------------------------------------


def test_random_shift_shifts_whole_images():
    images = np.random.default_rng(0).random((64, 5, 5, 2))
    shifted = random_shift(images, np.random.default_rng(1), pixels=1)
    offsets = set()
    for image, result in zip(images, shifted, strict=True):
        padded = np.pad(image, ((1, 1), (1, 1), (0, 0)))
        found = [
            (top, left)
            for top in range(3)
            for left in range(3)
            if np.array_equal(padded[top : top + 5, left : left + 5], result)
        ]
        assert len(found) == 1
        offsets.update(found)
    assert len(offsets) == 9


def test_random_mirror_mirrors_some():
    images = np.random.default_rng(0).random((64, 3, 5, 1))
    result = random_mirror(images, np.random.default_rng(1))
    mirrored = (result == images[:, :, ::-1]).all(axis=(1, 2, 3))
    kept = (result == images).all(axis=(1, 2, 3))
    assert (mirrored ^ kept).all() and 16 < mirrored.sum() < 48


# --- Digits --------------------------------------------------------------------------


def test_digits_folds_are_stratified_and_cover_all_images():
    seen = []
    for fold in range(5):
        data = load_data(config_of("digits", batch_size=360, fold=fold))
        assert data.train_size + data.test_size == 1797
        labels = data.test[0]["label"]
        labels = labels[labels >= 0]
        assert np.bincount(labels, minlength=10).min() >= 34
        seen.append(labels)
    assert len(np.concatenate(seen)) == 1797


def test_digits_train_and_test_images_are_standardized_alike():
    data = load_data(config_of("digits", batch_size=360))
    assert data.image_shape == (8, 8, 1) and data.classes == 10
    test = data.test[0]["image"]
    assert test.dtype == np.float32
    assert abs(test.mean()) < 0.05 and abs(test.std() - 1) < 0.05


# --- CIFAR-100 -----------------------------------------------------------------------


def write_cifar(path: Path, count: int, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    records = random.integers(0, 256, (count, RECORD_BYTES), np.uint8)
    records[:, 0] = random.integers(0, 20, count)
    records[:, 1] = random.integers(0, 100, count)
    records.tofile(path)
    return records


@pytest.mark.parametrize("below", ["", "cifar-100-binary"])
def test_cifar100_reads_records(tmp_path, below):
    folder = tmp_path / below
    folder.mkdir(exist_ok=True)
    train = write_cifar(folder / "train.bin", 12)
    test = write_cifar(folder / "test.bin", 3, seed=1)
    data = load_data(config_of("cifar100", tmp_path))
    assert (data.train_size, data.test_size, data.classes) == (12, 3, 100)
    assert any("12 of CIFAR-100's 50,000" in note for note in data.notes)
    batch = data.test[0]
    np.testing.assert_array_equal(batch["label"], [*test[:, 1], -1])
    # Undo the standardization, then compare one pixel's channels with the file.
    pixels = train[:, 2:].reshape(12, 3, 32, 32).astype(np.float64)
    mean, deviation = pixels.mean(axis=(0, 2, 3)), pixels.std(axis=(0, 2, 3))
    raw = batch["image"][1, 4, 7] * deviation + mean
    np.testing.assert_allclose(raw, test[1, 2 + 4 * 32 + 7 :: 1024], atol=1e-3)
    assert data.train[0]["image"].shape == (4, 32, 32, 3)


def damage(tmp_path: Path, name: str) -> None:
    write_cifar(tmp_path / "train.bin", 5)
    write_cifar(tmp_path / "test.bin", 5)
    path = tmp_path / "test.bin"
    if name == "missing":
        path.unlink()
    elif name == "empty":
        path.write_bytes(b"")
    elif name == "cut off":
        path.write_bytes(path.read_bytes()[:-1])
    elif name == "labels":
        content = bytearray(path.read_bytes())
        content[2 * RECORD_BYTES + 1] = 100
        path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", r"there is no file .*test\.bin.*train\.bin.*153,700,000 bytes"),
        ("empty", r"test\.bin is damaged.*multiple of 3,074.*got 0 bytes.*30,740,000"),
        ("cut off", r"test\.bin is damaged or cut off.*got 15,369 bytes"),
        ("labels", r"test\.bin is damaged.*record 2 has \d+ and 100"),
    ],
)
def test_cifar100_errors_say_what_to_put_where(tmp_path, name, message):
    damage(tmp_path, name)
    with pytest.raises(SetupError, match=message):
        load_data(config_of("cifar100", tmp_path))


# --- Image folder --------------------------------------------------------------------


def write_images(root: Path, classes=("cat", "dog"), count: int = 3) -> None:
    random = np.random.default_rng(0)
    for part in ("train", "val"):
        for name in classes:
            folder = root / part / name
            folder.mkdir(parents=True)
            for index in range(count):
                width, height = random.integers(20, 60, 2)
                pixels = random.integers(0, 256, (height, width, 3), np.uint8)
                Image.fromarray(pixels).save(folder / f"{index}.JPEG", format="JPEG")


def imagenet(root: Path | None, **changes):
    return config_of("imagenet", root, image_size=16, workers=2, **changes)


def test_image_folder_reads_images(tmp_path):
    write_images(tmp_path)
    # A grey PNG: decoded to RGB as well.
    grey = Image.new("L", (30, 40), 128)
    grey.save(tmp_path / "val" / "dog" / "x.png")
    data = load_data(imagenet(tmp_path))
    assert (data.train_size, data.test_size, data.classes) == (6, 7, 2)
    batch = next(batches(data.train, start=2))
    assert batch["image"].shape == (4, 16, 16, 3)
    assert batch["image"].dtype == np.float32 and batch["label"].dtype == np.int32
    assert_batches_equal(batch, data.train[2])
    tests = list(batches(data.test))
    np.testing.assert_array_equal(
        np.concatenate([t["label"] for t in tests]), [0, 0, 0, 1, 1, 1, 1, -1]
    )
    expected = (128 / 255 - np.array([0.485, 0.456, 0.406])) / [0.229, 0.224, 0.225]
    np.testing.assert_allclose(tests[1]["image"][2, 8, 8], expected, rtol=1e-5)


def test_labels_follow_the_training_classes(tmp_path):
    write_images(tmp_path, classes=("ant", "bee", "cat"), count=1)
    for path in (tmp_path / "val" / "ant").iterdir():
        path.unlink()
    (tmp_path / "val" / "ant").rmdir()
    data = load_data(imagenet(tmp_path))
    np.testing.assert_array_equal(data.test[0]["label"], [1, 2, -1, -1])


def break_folder(root: Path, name: str) -> None:
    write_images(root)
    val = root / "val"
    if name == "no val":
        val.rename(root / "validation")
    elif name == "flat":
        for folder in list(val.iterdir()):
            for path in folder.iterdir():
                path.rename(val / f"{folder.name}{path.name}")
            folder.rmdir()
    elif name == "empty class":
        (root / "train" / "emu").mkdir()
    elif name == "unknown class":
        (val / "dog").rename(val / "fox")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no val", r"there is no folder .*val\. Give the root.*ROOT/train/CLASS"),
        ("flat", r"has no folders, one per class.*unpacks flat.*sort"),
        ("empty class", r"train/emu holds no \.JPEG, \.jpg or \.png"),
        ("unknown class", r"val has classes that .*train has not: fox \(1 in all\)"),
    ],
)
def test_image_folder_errors_say_what_to_put_where(tmp_path, name, message):
    break_folder(tmp_path, name)
    with pytest.raises(SetupError, match=message):
        load_data(imagenet(tmp_path))


@pytest.mark.parametrize("content", [b"", b"no image", None])
def test_damaged_image_is_named(tmp_path, content):
    write_images(tmp_path, count=1)
    path = tmp_path / "train" / "cat" / "0.JPEG"
    path.write_bytes(path.read_bytes()[:-200] if content is None else content)
    data = load_data(imagenet(tmp_path))
    with pytest.raises(SetupError, match=r"cat/0\.JPEG is damaged or no image"):
        next(batches(data.train))


@pytest.mark.parametrize("preset", ["cifar100", "imagenet"])
def test_data_path_is_asked_for(preset):
    with pytest.raises(SetupError, match=rf"`--preset {preset}` needs a `--data-path`"):
        load_data(config_of(preset))
