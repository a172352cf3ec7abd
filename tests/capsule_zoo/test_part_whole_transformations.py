"""The experiments on transformed images run in miniature; turning helps where it should."""

import torch

from capsule_zoo.data import Split
from capsule_zoo.experiments.part_whole.transformations import count_choosing_parts, turn_to_best
from capsule_zoo.registry import create, small_settings


def test_turning_undoes_quarter_turns_up_to_where_the_model_wants_them():
    """Turned images come out the same however they were held."""
    torch.manual_seed(0)
    entry = create("part-whole", **{**small_settings("part-whole"), "epsilon": 1e-30})
    entry.model.double()
    entry.guide.double()
    images = torch.rand(9, 1, 12, 12, dtype=torch.float64)
    found = []
    for held in (images, images.rot90(1, (2, 3))):
        torch.manual_seed(1)
        found.append(turn_to_best(entry.guide, Split(held), 16).images)
    torch.testing.assert_close(found[1], found[0])


def test_parts_are_shared_out_among_the_objects_that_they_may_choose():
    torch.manual_seed(0)
    entry = create("part-whole", **small_settings("part-whole"))
    images = torch.rand(3, 1, 12, 12)
    torch.manual_seed(0)
    shares = count_choosing_parts(entry.guide, images)
    parts = entry.model.levels[-1].size
    assert shares.shape == (3, entry.model.levels[0].size)
    assert (shares >= 0).all() and (shares.sum(1) <= parts).all()
    entry.model.epsilon = 1e9  # every part is the dummy's
    for selection in entry.model.selections:
        selection.epsilon = 1e9
    assert count_choosing_parts(entry.guide, images).sum() < 1e-3
