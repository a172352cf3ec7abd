"""The fixed binarization is read as it stands in its files, with its own validation images."""

import numpy as np
import pytest
import torch

from capsule_zoo.data import MissingData, load_dataset, sources

SIZES = {"train": 6, "valid": 3, "test": 2}


@pytest.fixture
def rows(monkeypatch, tmp_path):
    """Write small files, and return what they hold, (N, 784) each."""
    monkeypatch.setattr(sources, "BITS_PARTS", SIZES)
    random = np.random.default_rng(0)
    arrays = {part: random.integers(2, size=(number, 784)) for part, number in SIZES.items()}
    (tmp_path / "binarized_mnist").mkdir()
    for part, bits in arrays.items():
        lines = "".join(" ".join(map(str, row)) + " \n" for row in bits)
        (tmp_path / "binarized_mnist" / f"binarized_mnist_{part}.amat").write_text(lines)
    return arrays


def test_every_split_is_its_file(rows, tmp_path):
    data = load_dataset("binarized-mnist", root=tmp_path, seed=3)
    splits = {"train": data.train, "valid": data.validation, "test": data.test}
    for part, split in splits.items():
        expected = torch.tensor(rows[part], dtype=torch.float32).view(-1, 1, 28, 28)
        assert torch.equal(split.images, expected)
        assert split.labels is None and len(split) == SIZES[part]
    assert data.num_classes == 0


def test_another_number_of_validation_images_is_chosen_by_the_seed(rows, tmp_path):
    data = load_dataset("binarized-mnist", root=tmp_path, validation=4)
    assert (len(data.train), len(data.validation), len(data.test)) == (5, 4, 2)
    together = torch.cat([data.train.images, data.validation.images]).flatten(1).long()
    originals = np.concatenate([rows["train"], rows["valid"]])
    assert sorted(map(tuple, together.tolist())) == sorted(map(tuple, originals.tolist()))


@pytest.mark.parametrize("damage", [lambda text: text[:-9], lambda text: text.replace("1", "2")])
def test_damaged_files_are_refused_with_their_address(rows, tmp_path, damage):
    file = tmp_path / "binarized_mnist" / "binarized_mnist_valid.amat"
    file.write_text(damage(file.read_text()))
    with pytest.raises(MissingData, match=r"2,352 zeros and ones.*published at http"):
        load_dataset("binarized-mnist", root=tmp_path)
