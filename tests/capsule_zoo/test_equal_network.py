"""Capsules beside an equal network: what is equal, what is chosen, and what is measured."""

import pytest
import torch
from miniature import few_digits

from capsule_zoo.experiments import Options, find_experiment
from capsule_zoo.experiments.zoo import equal_network
from capsule_zoo.experiments.zoo.equal_network import NETWORK, errors_of_changed, reader_of
from capsule_zoo.inference import fgsm
from capsule_zoo.models.routing.vector_capsules import primary_capsules
from capsule_zoo.registry import create, find_registration, load, save_entry, small_settings

SHORT = dict(seeds=2, rates=(0.001, 0.01), decays=(0.0, 0.1))
ENTRIES = {"capsule-network": {"guide": {"channels": 16}}, "matrix-capsules": NETWORK}
PAIRS = {
    "capsule-network": {"guide": {"channels": 8}},
    "recurrent-capsules": {"channels": (8, 8), "types": 2},
}
OF_PAIRS = {"preset": "overlapping"}
CASES = [*((name, {}) for name in ENTRIES), *((name, OF_PAIRS) for name in PAIRS)]


@pytest.fixture
def small_dataset(monkeypatch, unpainted):
    digits = few_digits(24, 12, size=17)
    monkeypatch.setattr(equal_network, "load_dataset", lambda *_, **__: digits)
    monkeypatch.setattr(equal_network, "DEGREES", (0, 30))
    return digits


@pytest.mark.parametrize("size", [17, 28, 40])
@pytest.mark.parametrize("sizes", ["preset", "experiment"])
@pytest.mark.parametrize(("name", "preset"), CASES)
def test_both_networks_have_as_many_weights_and_one_stem(name, preset, sizes, size):
    settings = preset | ((PAIRS if preset else ENTRIES)[name] if sizes == "experiment" else {})
    capsules = reader_of(create(name, image_shape=(1, size, size), **settings))
    plain = create("cnn", image_shape=(1, size, size), preset=name, capsules=settings).model
    assert plain.num_parameters == pytest.approx(capsules.num_parameters, rel=0.02)
    if name == "recurrent-capsules":
        stem = [*capsules.network.parameters(), *capsules.primary.parameters()]
    else:
        stem = (capsules.stem if name == "matrix-capsules" else capsules.primary).parameters()
    shapes = [parameter.numel() for parameter in stem]
    assert sorted(shapes) == sorted(parameter.numel() for parameter in plain.stem.parameters())


@pytest.mark.parametrize(("name", "preset"), CASES)
def test_the_stem_of_the_plain_network_computes_what_the_capsules_read(name, preset):
    torch.manual_seed(0)
    made = create("cnn", image_shape=(1, 17, 17), preset=name, capsules=preset)
    plain = made.model.double().eval()
    images = torch.rand(3, 1, 17, 17, dtype=torch.float64)
    features = plain.stem(images)
    maps = 128 if name == "capsule-network" else 64
    assert features.shape[:2] == (3, maps)
    torch.manual_seed(0)
    capsules = reader_of(create(name, image_shape=(1, 17, 17), **preset)).double().eval()
    if name == "recurrent-capsules":
        read = capsules.primary(capsules.network(images))
        torch.testing.assert_close(features, read.relu())
        children = primary_capsules(read)
        torch.testing.assert_close(capsules.scores(images), capsules.classes(children).norm(dim=-1))
    elif name == "matrix-capsules":
        torch.testing.assert_close(plain.stem(0.5 * images), features, rtol=1e-3, atol=1e-4)
    else:
        read = (capsules.primary.maps(images) * capsules.primary.read).sum((2, 3))
        torch.testing.assert_close(features.flatten(1), read.relu())


@pytest.mark.parametrize("preset", find_registration("cnn").presets)
def test_an_equal_network_is_trained_with_labels(preset):
    entry = create("cnn", image_shape=(1, 17, 17), preset=preset)
    assert entry.training["inputs"].labels


def test_a_saved_equal_network_is_built_again(tmp_path):
    entry = create("cnn", image_shape=(1, 17, 17), preset="matrix-capsules", capsules=NETWORK)
    save_entry(entry, tmp_path)
    twin, images = load(tmp_path), torch.rand(2, 1, 17, 17)
    assert torch.equal(twin.model.eval().scores(images), entry.model.eval().scores(images))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(preset="vae"), "unknown preset 'vae'"),
        (dict(preset="matrix-capsules", hidden=3), "unknown setting of cnn 'hidden'"),
        (dict(capsules=NETWORK), "unknown setting of cnn 'capsules'"),
        (
            dict(preset="capsule-network", capsules={"guide.network": "paper"}),
            "network must be 'small'",
        ),
        (dict(preset="recurrent-capsules", capsules=dict(capsules="every")), "one of 'once'"),
    ],
)
def test_settings_that_contradict_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        create("cnn", **settings)


def test_the_setting_with_the_lowest_validation_error_is_trained(small_dataset, monkeypatch):
    jobs = {}

    def pretended(job):
        task = job.variant
        jobs[job.name, job.options.seed] = task, job.options.minutes
        if task.is_try:
            good = {"capsules": (0.01, 0.1), "plain": (0.001, 0.0)}[task.network]
            return {"validation_error": (float((task.rate, task.decay) != good), 0.1, 9)}
        numbers = {"test_error": 0.5, "error_0_degrees": 0.5, "error_30_degrees": 0.5}
        numbers |= {f"error_fgsm_{e}": 0.5 for e in (0, 50, 100)} | {
            "updates": 7 + job.options.seed
        }
        return {name: (value, None, 1) for name, value in numbers.items()}

    monkeypatch.setattr(equal_network, "learn", pretended)
    run = find_experiment("matrix-capsules/equal-network")
    run(Options(minutes=120, progress=False, processes=1), **SHORT)
    trained = {n: task for (n, seed), (task, _) in jobs.items() if not task.is_try and seed == 1}
    for data in ("mnist", "fashion-mnist", "affnist"):
        assert trained[f"{data}-capsules"].rate == 0.01 and trained[f"{data}-capsules"].decay == 0.1
        assert trained[f"{data}-plain"].rate == 0.001 and trained[f"{data}-plain"].decay == 0
        assert trained[f"{data}-plain_equal_updates"].steps == 8  # the mean of 7 and 8, rounded
    spent = [minutes for task, minutes in jobs.values() if task.steps is None]
    assert sum(spent) == pytest.approx(120) and len(set(map(round, spent))) == 2


@pytest.mark.parametrize("name", ENTRIES)
def test_an_attack_reaches_the_scores_of_guide_or_model(name, small_dataset):
    torch.manual_seed(0)
    settings = {
        k: v for k, v in small_settings(name).items() if k not in ("image_shape", "classes")
    }
    entry = create(name, image_shape=small_dataset.image_shape, **settings)
    moved = fgsm(entry.model, small_dataset.test, 0.02, guide=entry.guide)
    change = (moved.images - small_dataset.test.images).abs()
    assert 0 < change.max() <= 0.02 + 1e-6
    score = torch.nn.functional.cross_entropy
    program = reader_of(entry).eval()
    losses = [score(program.scores(x.images), x.labels).item() for x in (small_dataset.test, moved)]
    assert losses[1] > losses[0]
    errors = errors_of_changed(entry, small_dataset.test)
    assert errors["error_0_degrees"] == errors["error_fgsm_0"]
