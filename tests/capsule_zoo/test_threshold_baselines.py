"""Thresholds and watershed on pictures where the right answer is plain."""

import pytest
import torch

from capsule_zoo.data.whole_pictures import MarkedPicture, read_whole_picture
from capsule_zoo.experiments.scenes import threshold_baselines
from capsule_zoo.experiments.scenes.threshold_baselines import (
    DEFAULTS,
    GRID,
    baseline_labels,
    best_baseline,
    f1_score,
    score_baseline,
    settings_of,
)
from capsule_zoo.inference.counting import disk_masks

CENTERS = torch.tensor([[20.0, 20.0], [41.0, 20.0], [70.0, 40.0]])  # the first two touch
RADII = torch.tensor([11.0, 11.0, 9.0])


def picture(tilt: float = 0.0, hole: bool = False) -> MarkedPicture:
    """Return three disks on a ground that rises from left to right by `tilt`."""
    shape = (60, 90)
    ground = torch.linspace(0, tilt, shape[1]).expand(shape)
    image = ground + 0.3 * disk_masks(CENTERS, RADII, shape).any(0)
    if hole:
        image[38:42, 68:72] = 0
    return MarkedPicture(image[None], CENTERS, RADII)


def number(image: torch.Tensor, method: str, **settings: object) -> int:
    labels = baseline_labels(image, method, **DEFAULTS[method] | settings)
    return len(labels.unique()) - 1


def test_a_watershed_divides_what_touches():
    image = picture(hole=True).image
    assert number(image, "otsu") == 2 and number(image, "watershed") == 3
    scores = score_baseline(picture(hole=True), "watershed", RADII, DEFAULTS["watershed"])
    assert scores.centers == (3, 0, 1.0, 1.0, 0) and scores.overlap > 0.9


def test_a_local_threshold_needs_no_even_ground():
    tilted = picture(tilt=1.0)
    otsu = score_baseline(tilted, "otsu", RADII, DEFAULTS["otsu"])
    assert otsu.overlap < 0.5, "the bright ground at the right is taken for an object"
    settings = DEFAULTS["local"] | dict(scale="linear", block=41, offset=0.1)
    local = score_baseline(tilted, "local", RADII, settings)
    assert local.centers == (3, 0, 1.0, 1.0, 0) and local.overlap > otsu.overlap + 0.05


def test_small_objects_are_left_out():
    image = torch.zeros(1, 40, 40)
    image[0, 5:9, 5:9], image[0, 20:30, 20:30] = 1, 1
    assert [number(image, "otsu", blur=0.0, least=least) for least in (16, 17, 101)] == [2, 1, 0]


@pytest.mark.parametrize("method", GRID)
def test_the_best_settings_are_at_least_as_good_as_any(monkeypatch, method):
    some = dict(list(threshold_baselines.SHARED_GRID.items())[1:], scale=("linear",), least=(20,))
    monkeypatch.setattr(threshold_baselines, "SHARED_GRID", some)
    small = {name: values[:2] for name, values in GRID[method].items()}
    monkeypatch.setitem(GRID, method, small)
    coins = read_whole_picture("coins", scale=0.3)
    best = best_baseline(coins, method, coins.radii)
    tried = [score_baseline(coins, method, coins.radii, s) for s in settings_of(method)]
    assert len(tried) == 3 * 2 ** len(small) and best.settings in [s.settings for s in tried]
    assert f1_score(best.centers) == max(f1_score(s.centers) for s in tried)


def test_nuclei_have_no_circles_to_overlap_with():
    nuclei = read_whole_picture("nuclei")
    scores = score_baseline(nuclei, "otsu", 10.0, DEFAULTS["otsu"] | dict(scale="root"))
    assert scores.overlap != scores.overlap and scores.centers.number > 30
