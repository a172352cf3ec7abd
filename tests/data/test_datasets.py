"""Data sets: each loads by name, refuses bad input, and transforms MNIST as documented."""

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torch.utils.data import DataLoader

from capsule_zoo.data import Batches, MissingData, load_dataset
from capsule_zoo.data.datasets import affnist, rotated_mnist
from capsule_zoo.data.own_pictures import all_pictures
from capsule_zoo.data.sources import torchvision_images

# most pictures here have one value, by which they are recognized
pytestmark = pytest.mark.filterwarnings("ignore:.*pictures have hardly any contrast")


def rows(images: torch.Tensor) -> set[bytes]:
    return {image.numpy().tobytes() for image in images}


# --- digits ---------------------------------------------------------------------------------------


def test_digits_need_nothing_from_outside():
    data = load_dataset()
    assert (len(data.train), len(data.validation), len(data.test)) == (1197, 200, 400)
    assert data.name == "digits" and data.image_shape == (1, 28, 28) and data.num_classes == 10
    for split in (data.train, data.validation, data.test):
        assert split.images.dtype == torch.float32 and split.labels.dtype == torch.int64
        assert split.images.min() >= 0 and split.images.max() <= 1
        assert set(split.labels.tolist()) == set(range(10))


def test_the_seed_chooses_validation_and_never_test():
    data, again, other = load_dataset(), load_dataset(), load_dataset(seed=1)
    assert torch.equal(data.train.images, again.train.images)
    assert torch.equal(data.test.images, other.test.images)
    assert rows(data.validation.images) != rows(other.validation.images)
    together = torch.cat([data.train.images, data.validation.images])
    assert rows(together) == rows(torch.cat([other.train.images, other.validation.images]))
    assert not rows(together) & rows(data.test.images)


def test_size_ten_is_the_original_with_a_border():
    from sklearn.datasets import load_digits

    data = load_dataset(size=10, validation=0)
    inner = torch.cat([data.train.images, data.test.images])[:, 0, 1:-1, 1:-1]
    original = torch.tensor(load_digits().images, dtype=torch.float32) / 16
    assert rows(inner.contiguous()) == rows(original)
    assert len(data.validation) == 0


# --- letters --------------------------------------------------------------------------------------


def test_letters_of_other_fonts_are_for_testing_and_all_are_inside_their_frame():
    data = load_dataset("font-letters")
    assert (len(data.train), len(data.validation), len(data.test)) == (324, 36, 80)
    assert data.class_names == tuple("ABEHKLORST") and data.image_shape == (1, 28, 28)
    together = torch.cat([data.train.images, data.validation.images])
    assert not rows(together) & rows(data.test.images) and len(rows(together)) == 360
    assert torch.equal(data.test.labels.bincount(), torch.full((10,), 8))
    images = torch.cat([together, data.test.images])
    assert images.min() == 0 and images.amax((1, 2, 3)).min() > 0.5
    edge = torch.ones(28, 28, dtype=torch.bool)
    edge[1:-1, 1:-1] = False
    assert images[:, 0, edge].max() < 0.5
    again = load_dataset("font-letters", size=(20, 30))
    assert torch.equal(load_dataset("font-letters").train.images, data.train.images)
    assert again.image_shape == (1, 20, 30) and torch.equal(again.train.labels, data.train.labels)


def test_labels_of_letters_are_those_that_are_drawn(monkeypatch):
    """An L has ink in its lower left corner, a T none there; upright, in one font."""
    monkeypatch.setattr("capsule_zoo.data.letters.DEGREES", 0.0)
    monkeypatch.setattr("capsule_zoo.data.letters.TEST_FONTS", ("DejaVuSans",))
    test = load_dataset("font-letters").test
    upright = {"LT"[label == 9]: test.images[test.labels == label][0, 0] for label in (5, 9)}
    ink = {letter: image[20:24, 6:12].max() for letter, image in upright.items()}
    assert ink["L"] > 0.9 and ink["T"] == 0
    columns = upright["T"].sum(0) / upright["T"].sum()
    assert (columns * torch.arange(28)).sum().item() == pytest.approx(13.5, abs=0.25)


def test_a_font_that_matplotlib_lacks_is_named(monkeypatch):
    monkeypatch.setattr("capsule_zoo.data.letters.TRAINING_FONTS", ("NoSuchFont",))
    with pytest.raises(MissingData, match=r"NoSuchFont\.ttf cannot be read.*pip install"):
        load_dataset("font-letters")


# --- torchvision's data sets ----------------------------------------------------------------------


def test_truncated_files_are_refused(tmp_path):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        for kind, header in (("images-idx3", [2051, 9, 28, 28]), ("labels-idx1", [2049, 9])):
            header = np.array(header, dtype=">i4").tobytes()
            (raw / f"{part}-{kind}-ubyte").write_bytes(header + b"\x00" * 5)
    with pytest.raises(MissingData, match="no readable MNIST"):
        load_dataset("mnist", root=tmp_path)


def test_cifar_is_read_as_rgb(tmp_path, monkeypatch):
    """The files have torchvision's layout, with two images in each of them."""
    import pickle

    from torchvision.datasets import CIFAR10

    folder = tmp_path / CIFAR10.base_folder
    folder.mkdir()
    pixels = np.zeros((2, 3, 32, 32), dtype=np.uint8)
    pixels[0, 0], pixels[1, 2, 5, 7] = 255, 51
    for name, _ in CIFAR10.train_list + CIFAR10.test_list:
        content = {"data": pixels.reshape(2, -1), "labels": [3, 9]}
        (folder / name).write_bytes(pickle.dumps(content))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    data = load_dataset("cifar10", root=tmp_path, validation=2)
    assert data.image_shape == (3, 32, 32) and len(data.train) == 8 and data.num_classes == 10
    red, dot = data.test.images
    assert torch.equal(red.amax((1, 2)), torch.tensor([1.0, 0.0, 0.0]))
    assert dot[2, 5, 7] == pytest.approx(0.2) and dot.count_nonzero() == 1


@pytest.fixture(scope="module")
def mnist(mnist_root):
    return torchvision_images("MNIST", mnist_root)


def test_mnist_has_its_known_mean_and_order(mnist_root):
    data = load_dataset("mnist", root=mnist_root)
    assert (len(data.train), len(data.validation), len(data.test)) == (55000, 5000, 10000)
    assert data.image_shape == (1, 28, 28) and data.class_names == tuple("0123456789")
    total = data.train.images.double().sum() + data.validation.images.double().sum()
    assert total / (60000 * 784) == pytest.approx(0.1307, abs=1e-4)
    assert data.test.labels[:8].tolist() == [7, 2, 1, 0, 4, 1, 4, 9]


def test_what_torchvision_prints_of_a_download_is_not_shown(tmp_path, monkeypatch, capsys):
    def read(*arguments, **settings):
        print("Failed to download (trying next): <urlopen error>")
        print("\r  0%|          | 0/100", file=sys.stderr)
        raise RuntimeError("Error downloading")

    monkeypatch.delenv("CAPSULE_ZOO_DATA", raising=False)
    monkeypatch.setattr(torchvision.datasets, "MNIST", read)
    with pytest.raises(MissingData, match=r"or use the data set 'digits' \('multi-digits' for"):
        load_dataset("mnist")
    assert capsys.readouterr() == ("", "")


def test_rotated_mnist_turns_the_test_images_only(mnist, mnist_root):
    rotated = rotated_mnist(mnist_root)
    assert torch.equal(rotated.train[0], mnist.train[0])
    assert torch.equal(rotated.test[1], mnist.test[1])
    assert rotated.test[0].shape == mnist.test[0].shape
    # the mean over uniform angles is nearly round: a 90-degree rotation hardly changes it
    mean = rotated.test[0].mean(0)[0]
    assert (mean - mean.rot90()).abs().max() < 0.04
    upright = mnist.test[0].mean(0)[0]
    assert (upright - upright.rot90()).abs().max() > 0.2


def test_affnist_loses_no_ink_and_fills_the_frame(mnist, mnist_root, monkeypatch):
    splits = [tuple(part[:4000] for part in split) for split in (mnist.train, mnist.test)]
    mnist = replace(mnist, train=splits[0], test=splits[1])
    monkeypatch.setattr("capsule_zoo.data.datasets.torchvision_images", lambda *_: mnist)
    made = affnist(mnist_root)
    assert made.train[0].shape == made.test[0].shape == (4000, 1, 40, 40)
    # shifts keep every pixel of the training images
    sums = made.train[0].double().sum((1, 2, 3)), mnist.train[0].double().sum((1, 2, 3))
    torch.testing.assert_close(*sums)
    # a map of determinant d multiplies the ink by d, up to sampling: .8^2 <= d <= 1.2^2
    ratio = made.test[0].sum((1, 2, 3)) / mnist.test[0].sum((1, 2, 3))
    assert ratio.min() > 0.55 and ratio.max() < 1.55 and ratio.mean() == pytest.approx(1, abs=0.015)
    inked = (made.test[0] > 0).any(0)[0]
    assert inked.float().mean() > 0.95


# --- a user's own folder --------------------------------------------------------------------------


def write(path: Path, color, size=(6, 4), mode="L") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, color).save(path)


@pytest.fixture
def gray_folder(tmp_path):
    for k in range(10):
        write(tmp_path / "cat" / f"{k}.png", 10 * k)
        write(tmp_path / "dog" / f"{k}.png", 10 * k + 5)
    return tmp_path


def test_a_folder_of_gray_images(gray_folder):
    (gray_folder / "cat" / "notes.txt").write_text("no image")
    (gray_folder / ".hidden").mkdir()
    data = load_dataset(f"folder:{gray_folder}", validation=3)
    assert data.image_shape == (1, 4, 6) and data.class_names == ("cat", "dog")
    assert (len(data.train), len(data.validation), len(data.test)) == (13, 3, 4)
    for split in (data.train, data.validation, data.test):
        value = (split.images[:, 0, 0, 0] * 255).round().long()
        assert torch.equal((value % 10 == 5).long(), split.labels)


def test_pictures_beside_folders_of_classes_are_ignored_with_a_warning(gray_folder):
    for name in ("._a.png", ".hidden.png", "cat/._0.png"):  # what macOS writes is no picture
        (gray_folder / name).write_bytes(b"no picture")
    assert len(load_dataset(gray_folder).test) == 4
    write(gray_folder / "stray.png", 9)
    with pytest.warns(UserWarning, match=r"1 pictures beside folders of classes.*stray\.png"):
        assert len(load_dataset(gray_folder).test) == 4


@pytest.mark.parametrize("tested", [True, False])
@pytest.mark.parametrize("name", ["val", "valid", "validation"])
def test_a_folder_for_validation_beside_train_is_read_as_such(tmp_path, name, tested):
    for k in range(5):
        write(tmp_path / "train" / "a" / f"{k}.png", 10 * k)
    write(tmp_path / name / "a" / "1.png", 102)
    if tested:
        write(tmp_path / "test" / "a" / "1.png", 51)
    data = load_dataset(tmp_path)
    assert data.validation.images.unique().tolist() == pytest.approx([0.4])
    assert (len(data.train), len(data.test)) == (5 - (not tested), 1)
    assert len(load_dataset(tmp_path, validation=2).validation) == 2
    assert len(all_pictures(tmp_path)[0]) == 6 + tested
    write(tmp_path / name / "b" / "1.png", 102)
    with pytest.raises(ValueError, match="classes that the training images lack: b"):
        load_dataset(tmp_path)


def test_whole_numbers_of_numpy_are_sizes():
    size, pair = np.int64(12), (np.int64(12), 10)
    assert load_dataset(size=size, validation=np.int64(3)).image_shape == (1, 12, 12)
    assert load_dataset(size=pair).image_shape == (1, 12, 10)


def test_train_and_test_folders_are_kept_apart(tmp_path):
    write(tmp_path / "train" / "a" / "1.png", 51)
    write(tmp_path / "train" / "b" / "1.jpg", 0)
    write(tmp_path / "test" / "b" / "1.png", 102)
    data = load_dataset(f"folder:{tmp_path}")
    assert (len(data.train), len(data.validation), len(data.test)) == (2, 0, 1)
    assert data.test.labels.tolist() == [1]
    assert data.test.images.unique().tolist() == pytest.approx([0.4])


def test_flat_train_and_test_folders_belong_together_and_two_images_are_enough(tmp_path):
    write(tmp_path / "train" / "1.png", 51)
    write(tmp_path / "test" / "2.png", 102)
    data = load_dataset(f"folder:{tmp_path}")
    assert data.train.labels is data.test.labels is None and data.num_classes == 0
    assert data.test.images.unique().tolist() == pytest.approx([0.4])
    assert (len(data.train), len(data.validation), len(data.test)) == (1, 0, 1)
    (tmp_path / "train" / "1.png").rename(tmp_path / "test" / "1.png")
    halves = load_dataset(f"folder:{tmp_path / 'test'}")
    assert (len(halves.train), len(halves.validation), len(halves.test)) == (1, 0, 1)


def test_the_first_images_of_a_folder_are_of_all_classes(tmp_path):
    """Files are read class by class, and `data.test[:n]` is what everything is measured on."""
    for split, kind, k in itertools.product(("train", "test"), ("a", "b"), range(20)):
        write(tmp_path / split / kind / f"{k}.png", 10 * k + (kind == "b"))
    data, again = (load_dataset(f"folder:{tmp_path}", validation=0) for _ in range(2))
    for split, same in ((data.train, again.train), (data.test, again.test)):
        assert len(split) == 40 and set(split[:10].labels.tolist()) == {0, 1}
        value = (split.images[:, 0, 0, 0] * 255).round().long()
        assert torch.equal(value % 10, split.labels) and len(value.unique()) == 40
        assert torch.equal(split.images, same.images)


def test_size_brings_images_of_several_sizes_together(gray_folder):
    write(gray_folder / "cat" / "large.png", 200, size=(30, 20))
    with pytest.raises(ValueError, match=r"20x30.*size= .*--size"):
        load_dataset(f"folder:{gray_folder}")
    for size in ((5, 7), "5x7"):
        assert load_dataset(f"folder:{gray_folder}", size=size).image_shape == (1, 5, 7)
    assert load_dataset(f"folder:{gray_folder}", size="9").image_shape == (1, 9, 9)


def test_a_flat_folder_has_no_labels(tmp_path):
    for k in range(10):
        write(tmp_path / f"{k}.png", 10 * k)
    data = load_dataset(f"folder:{tmp_path}", validation=1)
    assert (len(data.train), len(data.validation), len(data.test)) == (7, 1, 2)
    assert data.class_names == () and data.image_shape == (1, 4, 6)
    splits = (data.train, data.validation, data.test)
    shades = torch.cat([split.images[:, 0, 0, 0] for split in splits]) * 255
    assert sorted(shades.round().tolist()) == [10 * k for k in range(10)]
    assert all(split.labels is None for split in splits)
    for part in (data.train[:3], data.train.to("cpu"), data.train.binarize(), data.to("cpu").test):
        assert part.labels is None and len(part)
    assert torch.equal(data.train[2], data.train.images[2])
    assert next(iter(DataLoader(data.train, 7))).shape == (7, 1, 4, 6)
    images, labels = next(Batches(data.train, 4).epoch(0))
    assert len(images) == 4 and labels is None


@pytest.mark.parametrize("kind", ["bytes", "floats", "channels first", "channels last", "color"])
def test_a_file_of_numpy_holds_pictures_and_may_hold_their_labels(kind, tmp_path):
    shape = {"channels first": (20, 1, 5, 4), "channels last": (20, 5, 4, 1)}.get(kind, (20, 5, 4))
    images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    if kind == "color":
        images = np.stack([images, 255 - images, images // 2], -1)
    expected = torch.from_numpy(images.reshape(20, 5, 4, -1)).permute(0, 3, 1, 2).float() / 255
    pixels = images.astype(np.float64) / 255 if kind == "floats" else images
    np.savez(tmp_path / "mine.npz", images=pixels, labels=np.arange(20) % 3)
    data = load_dataset(str(tmp_path / "mine.npz"), validation=2)
    assert (len(data.train), len(data.validation), len(data.test)) == (14, 2, 4)
    assert data.class_names == ("0", "1", "2")
    splits = (data.train, data.validation, data.test)
    pictures, labels = (
        torch.cat([getattr(s, part) for s in splits]) for part in ("images", "labels")
    )
    distance = (pictures[:, None] - expected[None]).abs().amax((2, 3, 4))
    assert distance.amin(1).max() < 1e-6 and len(distance.argmin(1).unique()) == 20
    assert torch.equal(labels, distance.argmin(1) % 3)
    np.save(tmp_path / "mine.npy", pixels)
    unlabelled = load_dataset(f"folder:{tmp_path / 'mine.npy'}", validation=2)
    assert torch.equal(unlabelled.train.images, data.train.images)
    assert unlabelled.train.labels is None


def test_pictures_of_twelve_bits_in_files_of_sixteen_are_told(tmp_path):
    for number, top in enumerate((4000, 4095, 0)):
        deep = np.linspace(0, top, 30).astype(np.uint16).reshape(5, 6)
        Image.fromarray(deep).save(tmp_path / f"{number}.tiff")
    told = r"1\.tiff is the brightest of 3 .* 4,095 of 65,535, .* multiply their pixels by 16"
    with pytest.warns(UserWarning, match=told) as warned:
        dark = load_dataset(str(tmp_path), validation=0)
    assert len(warned) == 1 and dark.train.images.max() < 0.07
    Image.fromarray(np.full((5, 6), 4096, np.uint16)).save(tmp_path / "3.tiff")  # no warning
    write(tmp_path / "4.png", 5, size=(6, 5))
    assert len(load_dataset(str(tmp_path), validation=0).train) == 4


def test_a_file_of_numpy_may_hold_one_picture_in_color(tmp_path):
    for number in range(3):
        np.save(tmp_path / f"{number}.npy", np.full((6, 5, 3), [10, 20, 30], dtype=np.uint8))
    images = load_dataset(str(tmp_path), validation=0).train.images
    assert images.shape == (2, 3, 6, 5)
    assert (255 * images).round().unique(dim=0).amax((2, 3)).tolist() == [[10, 20, 30]]


def test_files_of_numpy_lie_in_folders_and_are_resized_as_pictures_are(tmp_path):
    ramp = np.linspace(0, 255, 40, dtype=np.uint8).reshape(1, 5, 8).repeat(3, 0)
    for part, number in (("train", 3), ("test", 1)):
        (tmp_path / part / "a").mkdir(parents=True)
        np.save(tmp_path / part / "a" / "ramps.npy", ramp[:number])
        Image.fromarray(ramp[0]).save(tmp_path / part / "a" / "ramp.png")
        write(tmp_path / part / "b" / "1.png", 51, size=(8, 5))
    data = load_dataset(f"folder:{tmp_path}", size="10x4")
    assert (len(data.train), len(data.test), data.class_names) == (5, 3, ("a", "b"))
    ramps = data.train.images[data.train.labels == 0]
    assert ramps.shape == (4, 1, 10, 4) and (ramps - ramps[0]).abs().max() < 1 / 255
    assert data.train.images[data.train.labels == 1].unique().tolist() == pytest.approx([0.2])


def test_sixteen_bits_beside_eight_keep_their_values(tmp_path):
    ramp = np.array([[0, 1, 257], [32768, 65534, 65535]], dtype=np.uint16)
    tmp_path.joinpath("train").mkdir()
    Image.fromarray(ramp).save(tmp_path / "train" / "ramp.png")
    write(tmp_path / "train" / "plain.png", 51, size=(3, 2))
    write(tmp_path / "test" / "plain.png", 51, size=(3, 2))
    images = load_dataset(f"folder:{tmp_path}").train.images
    assert images.shape == (2, 1, 2, 3) and images.dtype == torch.float32
    deep = images[images.std((1, 2, 3)).argmax(), 0]
    expected = torch.from_numpy(ramp.astype(np.float64) / 65535).float()
    torch.testing.assert_close(deep, expected, rtol=0, atol=1e-7)
