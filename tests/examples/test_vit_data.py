"""The data sets of the ViT example, on small files made here."""

import dataclasses
import itertools
import shutil
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


def test_batch_is_a_function_of_seed_and_position():
    first = load_data(config_of("digits", batch_size=100)).train
    again = load_data(config_of("digits", batch_size=100)).train
    other = load_data(config_of("digits", batch_size=100, seed=1)).train
    continued = batches(first, workers=3, start=16)
    for position in range(16, 20):  # past the end of the first pass
        assert_batches_equal(first[position], again[position])
        assert_batches_equal(first[position], next(continued))
    assert (first[0]["label"] != other[0]["label"]).any()


def test_a_pass_sees_every_image_once_and_the_last_test_batch_is_padded():
    data = load_data(config_of("digits", batch_size=479))  # 1,437 = 3 * 479
    labels = [data.train[i]["label"] for i in range(6)]
    passes = [np.concatenate(labels[:3]), np.concatenate(labels[3:])]
    np.testing.assert_array_equal(*map(np.sort, passes))
    assert (passes[0] != passes[1]).any()
    # The last test batch is padded.
    data = load_data(config_of("digits", batch_size=128))
    labels = [batch["label"] for batch in batches(data.test)]
    assert [len(label) for label in labels] == [128, 128, 128]
    assert sum(int((label >= 0).sum()) for label in labels) == data.test_size == 360


def test_random_shifts_and_mirrors_of_whole_images():
    images = np.random.default_rng(0).random((64, 5, 5, 2))
    shifted, offsets = random_shift(images, np.random.default_rng(1), pixels=1), set()
    for image, result in zip(images, shifted, strict=True):
        padded = np.pad(image, ((1, 1), (1, 1), (0, 0)))
        (offset,) = (
            (top, left)
            for top, left in itertools.product(range(3), repeat=2)
            if np.array_equal(padded[top : top + 5, left : left + 5], result)
        )
        offsets.add(offset)
    assert len(offsets) == 9
    images = np.random.default_rng(0).random((64, 3, 5, 1))
    result = random_mirror(images, np.random.default_rng(1))
    mirrored = (result == images[:, :, ::-1]).all(axis=(1, 2, 3))
    kept = (result == images).all(axis=(1, 2, 3))
    assert (mirrored ^ kept).all() and 16 < mirrored.sum() < 48


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
    # Test images are standardized as those of the training are.
    data = load_data(config_of("digits", batch_size=360))
    assert data.image_shape == (8, 8, 1) and data.classes == 10
    test = data.test[0]["image"]
    assert test.dtype == np.float32
    assert abs(test.mean()) < 0.05 and abs(test.std() - 1) < 0.05


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


def empty(file: Path) -> None:
    file.write_bytes(b"")


def cut_off(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def mislabel(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[2 * RECORD_BYTES + 1] = 100
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, r"there is no file .*test\.bin.*train\.bin.*153,700,000 bytes"),
        (empty, r"test\.bin is damaged.*multiple of 3,074.*got 0 bytes.*30,740,000"),
        (cut_off, r"test\.bin is damaged or cut off.*got 15,369 bytes"),
        (mislabel, r"test\.bin is damaged.*record 2 has \d+ and 100"),
    ],
)
def test_cifar100_errors_say_what_to_put_where(tmp_path, damage, message):
    write_cifar(tmp_path / "train.bin", 5)
    write_cifar(tmp_path / "test.bin", 5)
    damage(tmp_path / "test.bin")
    with pytest.raises(SetupError, match=message):
        load_data(config_of("cifar100", tmp_path))


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
    labels = np.concatenate([t["label"] for t in tests])
    np.testing.assert_array_equal(labels, [0, 0, 0, 1, 1, 1, 1, -1])
    expected = (128 / 255 - np.array([0.485, 0.456, 0.406])) / [0.229, 0.224, 0.225]
    np.testing.assert_allclose(tests[1]["image"][2, 8, 8], expected, rtol=1e-5)


def test_labels_follow_the_training_classes(tmp_path):
    write_images(tmp_path, classes=("ant", "bee", "cat"), count=1)
    shutil.rmtree(tmp_path / "val" / "ant")
    data = load_data(imagenet(tmp_path))
    np.testing.assert_array_equal(data.test[0]["label"], [1, 2, -1, -1])


def flatten(val: Path) -> None:
    for path in list(val.glob("*/*")):
        path.rename(val / f"{path.parent.name}{path.name}")
    for folder in [path for path in val.iterdir() if path.is_dir()]:
        folder.rmdir()


FOLDERS = {
    "no val": r"there is no folder .*val\. Give the root.*ROOT/train/CLASS",
    "flat": r"has no folders, one per class.*unpacks flat.*sort",
    "empty class": r"train/emu holds no \.JPEG, \.jpg or \.png",
    "unknown class": r"val has classes that .*train has not: fox \(1 in all\)",
}


@pytest.mark.parametrize("name", FOLDERS)
def test_image_folder_errors_say_what_to_put_where(tmp_path, name):
    write_images(tmp_path)
    val = tmp_path / "val"
    damages = {
        "no val": lambda: val.rename(tmp_path / "validation"),
        "flat": lambda: flatten(val),
        "empty class": lambda: (tmp_path / "train" / "emu").mkdir(),
        "unknown class": lambda: (val / "dog").rename(val / "fox"),
    }
    damages[name]()
    with pytest.raises(SetupError, match=FOLDERS[name]):
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
