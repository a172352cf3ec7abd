"""The experiments of stacked capsule autoencoders, shrunk until they take seconds."""

import pytest
import torch

from capsule_zoo.experiments import Options, find_experiment
from capsule_zoo.experiments import stacked_capsule_autoencoder as experiments
from capsule_zoo.inference.objectives.stacked_capsules import TERMS
from capsule_zoo.registry import create, small_sizes

NAME = "stacked-capsule-autoencoder"


@pytest.fixture
def entry():
    torch.manual_seed(0)
    return create(NAME, **small_sizes(NAME))


def test_explained_shares_are_at_most_one_image_each(entry):
    images = torch.rand(7, 1, 12, 12)
    found = experiments.explained(entry, images, batch_size=3)
    assert found.shape == (7, 2)
    assert (found >= 0).all() and (found.sum(1) <= 1 + 1e-6).all()


def test_figures_show_images_capsules_and_templates(entry):
    images = torch.rand(3, 1, 12, 12)
    figure = entry.figures["reconstructions"](entry, images)
    assert len(figure.axes) == 5 * 3
    assert len(entry.figures["templates"](entry, images).axes) == 2 * 3


def test_every_term_but_the_likelihoods_is_ablated_by_a_switch_of_the_objective():
    for name, loss in experiments.ABLATIONS.items():
        entry = create(NAME, **{**small_sizes(NAME), "loss": dict(loss)})
        off = {term for term in TERMS if not entry.objective.weights[term]}
        assert off == {key for key, value in loss.items() if key in TERMS and value == 0}, name
    switched = {key for loss in experiments.ABLATIONS.values() for key in loss}
    assert switched == (set(TERMS) - {"image", "parts"}) | {
        "noise",
        "stop_inputs",
        "stop_targets",
        "normalized",
    }


@pytest.mark.slow
def test_ablations_record_every_variant():
    small = {key: value for key, value in small_sizes(NAME).items() if key != "loss"}
    del small["image_shape"]
    settings = dict(data="digits", steps=2, batch_size=8, probed=60, tested=30, sizes=small)
    options = Options(progress=False, processes=1)
    result = find_experiment(f"{NAME}/ablations")(options, **settings)
    assert set(result.metrics["probe_presence"]) == set(experiments.ABLATIONS)
    assert {f"loss_{term}" for term in TERMS} <= set(result.metrics)
