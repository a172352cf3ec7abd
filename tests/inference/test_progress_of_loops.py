"""Every loop that can take minutes shows its progress where it is asked for, and only there."""

import pytest
import small_rbms
import small_scenes
import torch
from toys import Conjugate, conjugate_images, fit, pair

from capsule_zoo.data import Split, load_dataset, progress
from capsule_zoo.data.progress import show_progress
from capsule_zoo.guides import ExactLabel
from capsule_zoo.inference import compare, error_rate, evaluate, fill_in, log_partition
from capsule_zoo.inference.annealing import annealed_log_likelihood
from capsule_zoo.inference.evaluation.ancestral import mean_images
from capsule_zoo.inference.evaluation.verbs import encode
from capsule_zoo.inference.objects import find_objects
from capsule_zoo.inference.posterior.fitted import auto_normal
from capsule_zoo.inference.posterior.gauss_newton import gauss_newton
from capsule_zoo.inference.posterior.refine import refine
from capsule_zoo.models import ConvolutionalClassifier

SETTINGS = dict(temperatures=3, leapfrogs=2, pilot_chains=2, chains=2, simulated=2)


def classified():
    model = ConvolutionalClassifier((1, 12, 12), 2, channels=(2, 2))
    return error_rate(
        model, ExactLabel(model), Split(torch.rand(3, 1, 12, 12), torch.ones(3).long())
    )


def objects(slots: int):
    return find_objects(*small_scenes.pair(slots), draws=2)


LOOPS = {
    "evaluating: 1 of 3 passes": lambda: evaluate(
        *pair(), conjugate_images(3), num_particles=1, batch_size=1
    ),
    "evaluating second": lambda: compare(
        {"first": pair(), "second": pair()}, conjugate_images(3), num_particles=1
    ),
    "classifying": classified,
    "encoding": lambda: encode(*pair(), conjugate_images(3)),
    "drawing images": lambda: mean_images(Conjugate(), 3),
    "finding objects: 1 of 1 batches": lambda: objects(3),
    "looking for objects: 1 of 3 slots": lambda: objects(3),
    "choosing objects: 1 of 14 rounds at most": lambda: objects(7),
    "annealing: 1 of 4 temperatures": lambda: log_partition(
        small_rbms.small(), "ais", chains=2, temperatures=4
    ),
    "summing over states": lambda: log_partition(small_rbms.small(), "exact"),
    "annealing back": lambda: annealed_log_likelihood(*pair(), conjugate_images(1), **SETTINGS),
    "finding step lengths": lambda: annealed_log_likelihood(
        *pair(), conjugate_images(1), **SETTINGS
    ),
    "refining: 1 of 2 steps": lambda: refine(*pair(), conjugate_images(2), steps=2),
    "climbing": lambda: gauss_newton(*pair(), conjugate_images(2), steps=2, climb=2),
    "training: 2 of 2 steps": lambda: auto_normal(*pair(), conjugate_images(2), steps=2, seed=0),
    "filling in": lambda: fill_in(
        *pair(), conjugate_images(2), observed=conjugate_images(2) > 0.5, num_particles=1
    ),
    "drawing scenes": lambda: load_dataset("multi-sprites:train=20,test=20"),
}


@pytest.mark.parametrize("line", LOOPS)
def test_a_long_loop_says_how_far_it_is(line, monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS_TO_FIRST_LINE", 0)
    LOOPS[line]()
    assert capsys.readouterr().err == ""
    with show_progress():
        LOOPS[line]()
    assert line in capsys.readouterr().err


def test_training_shows_its_own_bar_alone(monkeypatch, capsys):
    """A guide that refines, or looks slot by slot, would show a bar in every step."""
    monkeypatch.setattr(progress, "SECONDS_TO_FIRST_LINE", 0)
    model, guide, images = small_scenes.pair()
    with show_progress():
        fit(model, guide, images, steps=2, batch_size=3)
    assert {line.partition(":")[0] for line in capsys.readouterr().err.splitlines()} == {"training"}
