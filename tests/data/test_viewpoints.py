"""smallNORB's files, written here in their format, and toys whose pictures follow from geometry."""

import gzip
import math

import numpy as np
import pytest
import torch
from torch.nn.functional import avg_pool2d

from capsule_zoo.data import MissingData, letters, load_dataset
from capsule_zoo.data.letters import DISTANCE, LetterViews, plane_coordinates
from capsule_zoo.data.toys3d import Solid, Toys3D, cast, make_toy, render
from capsule_zoo.data.viewpoints import CATEGORIES, SmallNORB

MAGIC = {np.dtype("u1"): 0x1E3D4C55, np.dtype("<i4"): 0x1E3D4C54}


def matrix(values):
    """Return bytes in the format of the data set's page: at least three sizes are written."""
    sizes = [*values.shape] + [1] * (3 - values.ndim)
    head = np.array([MAGIC[values.dtype], values.ndim, *sizes], "<u4")
    return head.tobytes() + values.tobytes()


@pytest.fixture
def norb(tmp_path):
    """Write six pairs of images of 4x4 pixels for each split; training files are packed."""
    random = np.random.default_rng(0)
    written = {}
    for part, stem in SmallNORB.stems.items():
        arrays = {
            "dat": random.integers(0, 256, (6, 2, 4, 4)).astype("u1"),
            "cat": np.arange(6).astype("<i4") % 5,
            "info": np.stack(
                [np.arange(6), np.arange(6) % 3, np.arange(6) * 2, np.arange(6) % 2], 1
            ).astype("<i4"),
        }
        for kind, values in arrays.items():
            raw, name = matrix(values), f"{stem}-{kind}.mat"
            if part == "training":
                raw, name = gzip.compress(raw), f"{name}.gz"
            (tmp_path / name).write_bytes(raw)
        written[part] = arrays
    return tmp_path, written


def test_small_norb_keeps_images_of_the_left_camera_and_factors(norb):
    root, written = norb
    data = SmallNORB(root)
    for views, part in ((data.train, "training"), (data.test, "testing")):
        arrays = written[part]
        assert np.array_equal(views.images.numpy(), arrays["dat"][:, :1])
        assert np.array_equal(views.labels.numpy(), arrays["cat"])
        factors = torch.stack(
            [views.instance, views.elevation, 2 * views.azimuth, views.lighting], 1
        )
        assert np.array_equal(factors.numpy(), arrays["info"])


def test_views_are_selected_by_their_factors(norb):
    views = SmallNORB(norb[0]).train
    subset = views.select(azimuth=[1, 2, 5], lighting=[1])
    assert subset.azimuth.tolist() == [1, 5]
    assert torch.equal(subset.images, views.images[[1, 5]])
    split = subset.split(size=2)
    assert split.images.shape == (2, 1, 2, 2) and split.images.max() <= 1
    with pytest.raises(ValueError, match="unknown factor 'azimut'"):
        views.select(azimut=[1])
    with pytest.raises(ValueError, match="no view"):
        views.select(azimuth=[17])


def test_damaged_files_are_named(norb):
    root, _ = norb
    file = next(root.glob("*testing-dat.mat"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(MissingData, match=r"testing-dat.*bytes, where a matrix of \[6, 2, 4, 4\]"):
        SmallNORB(root)


def test_files_are_downloaded_to_the_cache_once(norb, tmp_path, monkeypatch):
    root, written = norb
    for file in root.glob("*testing*.mat"):
        file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(SmallNORB, "home", f"{root.as_uri()}/")
    for _ in range(2):
        data = SmallNORB()
        assert np.array_equal(data.test.labels.numpy(), written["testing"]["cat"])
        monkeypatch.setattr(SmallNORB, "home", "file:///nowhere/")  # the second time from the cache
    cached = list((tmp_path / "cache" / "capsule-zoo" / "smallnorb").iterdir())
    assert len(cached) == 6 and all(file.suffix == ".gz" for file in cached)


def test_without_a_network_it_is_said_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(SmallNORB, "home", "http://127.0.0.1:9/")
    with pytest.raises(MissingData, match=r"training-dat.*set root= or CAPSULE_ZOO_DATA.*toys3d"):
        SmallNORB()
    assert not list((tmp_path / "capsule-zoo" / "smallnorb").iterdir())


SOLIDS = [
    (Solid("ellipsoid", (0.1, 0, 0), (0.5, 0.3, 0.2)), 0.4, (-1.0, 0, 0)),
    (Solid("box", (0.1, 0, 0), (0.5, 0.3, 0.2)), 0.4, (-1.0, 0, 0)),
    (Solid("cylinder", (0.1, 0, 0), (0.5, 0.3, 0.2)), 0.4, (-1.0, 0, 0)),
    # a cone of height .4 on a base of radius .5: half the radius at half the height
    (Solid("cylinder", (0.1, 0, 0), (0.5, 0.3, 0.2), taper=1.0), 0.15, (-0.4, 0, 0.5)),
    (Solid("box", (0, 0, 0), (0.5, 0.3, 0.2), tilt=math.pi / 2), 0.2, (-1.0, 0, 0)),
]


@pytest.mark.parametrize(("solid", "reach", "normal"), SOLIDS)
def test_a_ray_meets_a_solid_where_geometry_says(solid, reach, normal):
    """The ray runs along x through the middle: surface distance and outward normal are known."""
    origin, ray = torch.tensor([-3.0, 0, 0]), torch.tensor([1.0, 0, 0])
    distance, normals, shade = cast([solid], origin, ray)
    assert distance == pytest.approx(3 - reach, abs=1e-5)
    expected = torch.nn.functional.normalize(torch.tensor(normal), dim=0)
    torch.testing.assert_close(normals, expected, rtol=0, atol=1e-5)
    assert shade == pytest.approx(solid.shade)
    assert cast([solid], origin + torch.tensor([0, 0, 0.9]), ray)[0] > 1e5


def test_the_nearest_solid_is_seen():
    near, far = (Solid("box", (x, 0, 0), (0.1, 0.1, 0.1), shade=abs(x)) for x in (-0.5, 0.4))
    for order in ([near, far], [far, near]):
        _, _, shade = cast(order, torch.tensor([-3.0, 0, 0]), torch.tensor([1.0, 0, 0]))
        assert shade == pytest.approx(0.5)


def test_turning_the_camera_is_turning_the_toy():
    """A ball looks the same from all sides; a toy mirrored in its plane of symmetry mirrors."""
    angles = torch.tensor([0.7, -0.7])
    steep = torch.full((2,), 0.6)
    ball = render([Solid("ellipsoid", (0, 0, 0), (0.5, 0.5, 0.5))], angles, steep, size=16)
    torch.testing.assert_close(ball[0], ball[1], atol=1e-4, rtol=0)
    symmetric = [
        Solid("box", (0.3, 0, 0), (0.3, 0.2, 0.1)),
        Solid("box", (0, 0, 0.3), (0.1, 0.3, 0.1)),
    ]
    left, right = render(symmetric, angles, steep, size=16)[:, 2]  # a lamp in the middle
    torch.testing.assert_close(left, right.flip(-1), atol=2e-2, rtol=0)


def test_toys_are_the_same_by_seed_and_differ_by_instance():
    assert make_toy("car", 3) == make_toy("car", 3)
    assert len({str(make_toy(c, k, s)) for c in CATEGORIES for k in range(4) for s in (0, 1)}) == 40


def test_toys3d_is_a_full_grid_of_factors_cached_and_split_by_instance(tmp_path):
    settings = dict(size=12, cache=tmp_path, azimuths=3, elevations=2, instances=2)
    toys = Toys3D(**settings)
    (file,) = tmp_path.iterdir()
    written = file.stat().st_mtime_ns
    again = Toys3D(**settings)
    assert file.stat().st_mtime_ns == written
    assert torch.equal(again.test.images, toys.test.images)
    for views, instance in ((toys.train, 0), (toys.test, 1)):
        assert len(views) == 5 * 3 * 2 * 6 and set(views.instance.tolist()) == {instance}
        one = views.select(labels=[4], azimuth=[2], elevation=[1], lighting=[5])
        angle, steep = torch.tensor([4 * math.pi / 3]), torch.tensor([math.radians(70)])
        expected = render(make_toy("car", instance), angle, steep, size=12)[0, 5]
        torch.testing.assert_close(one.split().images[0, 0], expected, atol=3e-3, rtol=0)
        assert views.images.float().std((1, 2, 3)).min() > 10  # something is to be seen in each


@pytest.fixture(scope="module")
def letter_views():
    return LetterViews(16)


@pytest.mark.parametrize("degrees", [-60.0, 0.0, 35.0])
def test_a_view_of_a_plane_in_perspective_follows_the_formula(degrees):
    """By similar triangles, of a camera that moves around the vertical or the horizontal axis."""
    angle, zero = torch.tensor([math.radians(degrees)]), torch.zeros(1)
    axis = (torch.arange(10) + 0.5) / 5 - 1
    y, x = torch.meshgrid(-axis, axis, indexing="ij")  # y is up
    for azimuth, elevation, along, across in ((angle, zero, x, y), (zero, angle, y, x)):
        first = along / (angle.cos() + along * angle.sin() / DISTANCE)
        second = across * (1 - first * angle.sin() / DISTANCE)
        horizontal, vertical = (first, second) if along is x else (second, first)
        (points,) = plane_coordinates(azimuth, elevation, 10)
        torch.testing.assert_close(points, torch.stack([horizontal, -vertical], -1))


def test_letters_from_the_front_are_as_drawn_and_their_labels_right(letter_views):
    fonts = (*letters.TRAINING_FONTS, *letters.TEST_FONTS)
    for views, font in ((letter_views.train, 7), (letter_views.test, 19)):
        front = views.select(instance=[font], azimuth=[4], elevation=[4])
        assert front.classes == tuple("ABEHKLORST") and front.labels.tolist() == list(range(10))
        drawn = [letters._draw_upright(c, fonts[font], (64, 64)) for c in front.classes]
        pixels = torch.tensor(np.stack(drawn))[:, None].float()
        torch.testing.assert_close(front.images.float(), avg_pool2d(pixels, 4), atol=0.51, rtol=0)


def test_letters_have_81_views_and_test_fonts_are_others(letter_views):
    train, test = letter_views.train, letter_views.test
    assert (len(train), len(test)) == (10 * 18 * 81, 10 * 4 * 81)
    assert not set(train.instance.tolist()) & set(test.instance.tolist())
    for views in (train, test):
        low = views.select(azimuth=[0], elevation=[8])  # from the left, above
        wide = views.select(azimuth=[4], elevation=[4])
        assert low.images.float().mean() < 0.5 * wide.images.float().mean()
        assert views.images.flatten(1).amax(1).min() > 60  # something is to be seen in each
    left, right = (test.select(labels=[3], azimuth=[k], elevation=[4]) for k in (1, 7))
    torch.testing.assert_close(  # an upright H is its own mirror image, an oblique one is not
        left.images[0].float(), right.images[0].flip(-1).float(), atol=30, rtol=0
    )


def test_views_of_letters_are_a_data_set_of_ten_classes():
    data = load_dataset("letter-views")
    assert data.class_names == tuple("ABEHKLORST") and data.image_shape == (1, 32, 32)
    assert (len(data.train), len(data.validation), len(data.test)) == (13_122, 1458, 3240)
