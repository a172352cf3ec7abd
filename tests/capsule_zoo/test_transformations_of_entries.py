"""One protocol for every entry: what it says of numbers that stay, follow or do neither."""

import pytest
import torch
from miniature import few_digits, names_in_record

from capsule_zoo.data import transforms
from capsule_zoo.experiments import Options
from capsule_zoo.experiments.zoo import transformations
from capsule_zoo.experiments.zoo.transformations import (
    MOTIONS,
    classes,
    compared,
    entry_of,
    explained,
    read,
)
from capsule_zoo.registry import create, list_models, read_recipe, small_sizes, takes_images

QUICK = Options(progress=False, processes=1)
NAMES = [name for name in list_models() if takes_images(name)]
KINDS = {
    "cnn": {"code", "class"},
    "matrix-capsules": {"pose", "presence", "class"},
    "capsule-network": {"pose", "presence", "class"},
    "part-whole": {"pose", "presence"},
    "shape-codes": {"code", "pose", "presence"},
    "capsule-rbm": {"code", "presence"},
    "vae": {"code"},
}


@pytest.mark.parametrize("name", NAMES)
def test_every_entry_is_read_by_kind(name):
    torch.manual_seed(0)
    entry = create(name, **small_sizes(name))
    images = torch.rand(5, *entry.model.image_shape)
    kinds = {**read(entry, images), **classes(entry, images)}
    assert {len(numbers) for numbers in kinds.values()} == {5}
    assert set(kinds) == KINDS.get(name, set(kinds))
    if "presence" in kinds:
        assert kinds["presence"].min() >= 0 and kinds["presence"].max() <= 1


def test_what_stays_what_follows_and_what_does_neither():
    generator = torch.Generator().manual_seed(0)
    known, first, noise = torch.randn(3, 400, 6, generator=generator)
    turn = torch.linalg.qr(torch.randn(6, 6, generator=generator))[0]
    classes = torch.tensor([0, 1] * 200)
    one = {"code": known, "pose": known, "presence": known, "class": classes}
    two = {"code": first, "pose": first, "presence": first, "class": classes}
    moved = {"code": known, "pose": known @ turn + 3, "presence": noise.flip(0), "class": classes}
    after = {"code": first, "pose": first @ turn + 3, "presence": noise, "class": 1 - classes}
    found = {name: number[0] for name, number in compared(two, after, one, moved).items()}
    assert found["move_code"] == 0 and found["follows_code"] == pytest.approx(1, abs=1e-3)
    assert found["move_pose"] > 8 and found["follows_pose"] == pytest.approx(1, abs=1e-3)
    assert found["move_presence"] == pytest.approx(2, abs=0.2)
    assert found["follows_presence"] == pytest.approx(0, abs=0.05)
    assert found["changed_class"] == 1


def test_numbers_that_hardly_vary_do_not_upset_the_map():
    known, first = torch.randn(2, 300, 3, generator=torch.Generator().manual_seed(0))
    known[:, 2] = 1e-9 * known[:, 2]
    assert explained(known, known, first, first * torch.tensor([1.0, 1.0, 0.0]))[0] > 0.99


def test_numbers_that_are_constant_are_left_out():
    still = {"code": torch.ones(4, 2), "class": torch.zeros(4)}
    assert set(compared(still, still, still, still)) == {"changed_class"}


@pytest.mark.parametrize("name", MOTIONS)
def test_a_motion_moves_a_dot_as_its_name_says(name):
    """A dot at (4, -3) from the middle of 21x21 pixels, y downwards."""
    image = torch.zeros(1, 1, 21, 21)
    image[..., 7, 14] = 1
    _, (amount, *_), motion = MOTIONS[name]
    moved = transforms.warp_images(image, motion(amount)).flatten()
    place = moved @ transforms.pixel_centers(21, 21) / moved.sum()
    angle = torch.tensor(amount).deg2rad()
    expected = {
        "shift": (4 + amount, -3),
        "turn": (4 * angle.cos() - 3 * angle.sin(), -3 * angle.cos() - 4 * angle.sin()),
        "scale": (4 * (1 + amount), -3 * (1 + amount)),
        "shear": (4 - 3 * amount, -3),
    }
    torch.testing.assert_close(place, torch.tensor(expected[name]), atol=0.15, rtol=0)


def test_it_names_what_it_measures(monkeypatch, tmp_path, unpainted):
    few = few_digits(24, 12, size=17)
    monkeypatch.setattr(transformations, "load_dataset", lambda *_, **__: few)
    monkeypatch.setattr(transformations, "published", lambda *_: None)
    how = dict(entries=("cnn", "vae"), images=12, fitted=20, updates=1)
    found, figures = names_in_record("zoo/transformations", QUICK, tmp_path / "out", **how)
    places = [f"{m}_{a:g}".replace(".", "_") for m, (_, own, _) in MOTIONS.items() for a in own]
    codes = {
        f"{q}_code_{n}_{p}" for q in ("move", "follows") for n in how["entries"] for p in places
    }
    assert found == codes | {f"changed_class_cnn_{p}" for p in places}
    assert figures == {""}


def test_published_weights_are_read_where_an_entry_has_any(monkeypatch):
    monkeypatch.setattr(transformations, "load", lambda name: read_recipe(name)["entry"])
    few = few_digits(24, 12, size=17)
    for name in ("generative-capsnet-continuous", "part-whole", "matrix-capsules"):
        assert entry_of(name, few, 1, QUICK) == name
    for name in ("generative-capsnet", "vae"):  # whose weights of MNIST are of another entry
        assert entry_of(name, few, 1, QUICK).name == name
