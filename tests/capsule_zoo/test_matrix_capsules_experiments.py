"""The experiments on matrix capsules run in miniature and name what they promise."""

from dataclasses import replace

import pytest
import torch
from miniature import few_digits, few_views, names_in_record

from capsule_zoo.data import Split
from capsule_zoo.experiments import Job, Options, reproduce
from capsule_zoo.experiments.matrix_capsules import headline as matrix_capsules
from capsule_zoo.experiments.matrix_capsules import iterations as matrix_capsules_iterations
from capsule_zoo.experiments.matrix_capsules import learning, viewpoints
from capsule_zoo.experiments.matrix_capsules.headline import ink_center, nudged
from capsule_zoo.experiments.matrix_capsules.iterations import Lengths, network_at_length
from capsule_zoo.experiments.matrix_capsules.learning import KINDS, Settings, Smoothed, Way
from capsule_zoo.experiments.matrix_capsules.viewpoints import Trainings, matched, novel_values
from capsule_zoo.experiments.zoo.equal_network import Task
from capsule_zoo.registry import create, save

QUICK = Options(minutes=0.003, progress=False, processes=1)


NETWORK = dict(features=4, capsules=(2, 2, 2))


@pytest.fixture(autouse=True)
def miniature(monkeypatch, unpainted):
    """Use few small digits, and views of noise."""
    few = few_digits(40, 12, size=17)
    for module in (matrix_capsules, matrix_capsules_iterations, learning):
        monkeypatch.setattr(module, "load_dataset", lambda *_, **__: few)
    noise = lambda *_: (few_views(), few_views())  # noqa: E731
    monkeypatch.setattr(viewpoints, "views", noise)
    return few


def test_gradients_grow_with_the_iterations_unless_the_power_is_small():
    images = Split(torch.rand(8, 1, 20, 20), torch.arange(8) % 4, "noise")

    def slope(iterations, power):
        torch.manual_seed(0)
        sizes = dict(features=8, capsules=(4, 4, 4), classes=4)
        how = dict(image_shape=(1, 20, 20), iterations=iterations, power=power, **sizes)
        return matrix_capsules_iterations.first_gradient(create("matrix-capsules", **how), images)

    assert slope(5, 1.0) > 100 * slope(2, 1.0)
    assert slope(5, 1 / 16) < slope(2, 1.0)


def test_networks_at_length_differ_in_iterations_and_power():
    made = {
        name: network_at_length(iterations, Lengths(power=0.3), (1, 28, 28))
        for name, iterations in matrix_capsules_iterations.AT_LENGTH.items()
    }
    found = {
        name: (entry.model.classes.routing.iterations, entry.model.classes.routing.power)
        for name, entry in made.items()
    }
    assert found == {"two_iterations": (2, 1.0), "three_iterations": (3, 0.3)}


def test_networks_at_length_start_from_a_trained_one(tmp_path):
    trained = create("matrix-capsules", image_shape=(1, 28, 28), **NETWORK)
    trained.model.updates.fill_(1234)
    save(trained, tmp_path / "trained", data="mnist", seed=0)
    options = replace(QUICK, run=str(tmp_path / "trained"))
    settings = dict(network=NETWORK, lr=1e-12)
    result, _ = reproduce("matrix-capsules/at-length", options, folder=tmp_path, **settings)
    found = result.entry.model
    assert found.updates > 1234
    assert found.classes.routing.iterations in (2, 3)  # the one with the lower validation error
    for name, value in trained.model.named_parameters():
        torch.testing.assert_close(found.get_parameter(name), value, rtol=0, atol=1e-6)


def test_dynamic_routing_takes_no_power():
    assert create("matrix-capsules", power=0.3, iterations=3).model.classes.routing.power == 0.3
    with pytest.raises(ValueError, match="power must be left out for routing 'dynamic'"):
        create("matrix-capsules", routing="dynamic", power=0.5)


def points(*errors):
    return [{"familiar": familiar, "novel": novel} for familiar, novel in errors]


def test_networks_are_matched_where_the_worse_one_is_best():
    paths = {
        "capsules": points((0.5, 0.6), (0.2, 0.3), (0.05, 0.2)),
        "cnn": points((0.4, 0.7), (0.18, 0.5), (0.3, 0.4)),
    }
    found = matched(paths)
    assert found["cnn"] == {"familiar": 0.18, "novel": 0.5}
    share = (0.2 - 0.18) / (0.2 - 0.05)
    assert found["capsules"]["familiar"] == pytest.approx(0.18)
    assert found["capsules"]["novel"] == pytest.approx(0.3 + share * (0.2 - 0.3))


def test_a_training_that_begins_below_the_common_error_is_judged_at_its_start():
    paths = {"capsules": points((0.5, 0.6)), "cnn": points((0.1, 0.7), (0.05, 0.5))}
    assert matched(paths)["cnn"] == {"familiar": 0.1, "novel": 0.7}


def test_novel_views_are_those_that_are_not_familiar():
    assert novel_values(few_views(), "azimuth") == [3]
    assert novel_values(few_views(), "elevation") == [3]


def test_a_try_is_judged_by_views_that_it_was_not_trained_on(monkeypatch):
    seen, both = {}, (few_views(), few_views())
    monkeypatch.setattr(viewpoints, "views", lambda *_: both)
    monkeypatch.setattr(viewpoints, "train", lambda e, split, *_, **how: seen.update(how, of=split))
    monkeypatch.setattr(viewpoints, "error_rate", lambda _, __, split: split)
    given = Trainings(size=17, views=5, sizes=NETWORK)
    task = Task("matrix-capsules", "plain", "azimuth", 0.02, 0.1, given, is_try=True)
    judged = viewpoints.learn(Job("", task, QUICK), source="")["validation_error"]
    whole = viewpoints.seen_views(Job("", task, QUICK), "")[0]
    assert len(judged) == 5 and len(seen["of"]) == len(whole) - 5 and seen["lr"] == 0.02
    brightness = [split.images.sum((1, 2, 3)) for split in (judged, seen["of"], whole)]
    torch.testing.assert_close(torch.cat(brightness[:2]).sort()[0], brightness[2].sort()[0])


def test_networks_on_views_are_equal_tuned_and_trained_for_equal_minutes(monkeypatch):
    minutes, rates, good = [], {}, {"capsules": 0.01, "plain": 0.001}

    def learn(job, *, source):
        minutes.append(job.options.minutes)
        task = job.variant
        if task.is_try:
            return {"validation_error": (float(task.rate != good[task.network]), 0.1, 9)}
        entry = viewpoints.begun_on(viewpoints.seen_views(job, "")[0], task, QUICK)
        rates.setdefault((task.network, entry.model.num_parameters), set()).add(task.rate)
        return {"path": [{"familiar": 0.1, "novel": 0.2, "fgsm_0_error": 0.1}]}

    monkeypatch.setattr(viewpoints, "learn", learn)
    given = Trainings(rates=(0.001, 0.01), tried=0.25, seeds=2, size=17)
    viewpoints.viewpoints(replace(QUICK, minutes=100, processes=1), given)
    assert {name: found for (name, _), found in rates.items()} == {n: {r} for n, r in good.items()}
    capsules, plain = (count for _, count in sorted(rates))
    assert plain == pytest.approx(capsules, rel=0.02)
    assert sum(minutes) == pytest.approx(100) and max(minutes) == pytest.approx(4 * min(minutes))
    assert len(minutes) == 2 * 2 * (2 + 2)


def test_a_nudge_moves_one_number_of_the_class_by_its_deviation():
    codes, labels = torch.zeros(6, 3, 16), torch.tensor([0, 1, 1, 2, 1, 0])
    codes[torch.arange(6), labels] = torch.randn(6, 16)
    moved = nudged(codes.flatten(1), 5, 2.0).unflatten(1, (3, 16)) - codes
    for n, label in enumerate(labels.tolist()):
        deviation = codes[labels == label, label, 5].std(correction=0)
        assert moved[n, label, 5] == pytest.approx(2 * deviation.item(), abs=1e-6)
    moved[torch.arange(6), labels, 5] = 0
    assert moved.abs().max() == 0


def test_the_inks_center_moves_with_the_ink():
    images = torch.zeros(2, 1, 6, 8)
    images[0, 0, 1:3, 2:5] = 0.7
    images[1] = images[0].roll((2, 3), (1, 2))
    center = ink_center(images)
    torch.testing.assert_close(center[0], torch.tensor([1.5, 3.0]))
    torch.testing.assert_close(center[1] - center[0], torch.tensor([2.0, 3.0]))


def test_viewpoints_smallnorb_compares_on_smallnorb(monkeypatch):
    """The experiment `viewpoints-smallnorb` differs from `viewpoints` in its data alone."""
    monkeypatch.setattr(viewpoints, "compared", lambda data, *_: data)
    assert viewpoints.viewpoints_smallnorb(Options(), None) == "smallnorb"


def test_a_search_keeps_the_changes_that_lower_the_error_and_goes_on_from_them(monkeypatch):
    gains = {"cut": 4, "rate": 0.01, "likelihood": "categorical", "shift": 0}
    tried = []

    def pretended(job, *, chosen):
        tried.append((job.name, job.options.minutes))
        better = sum(getattr(job.variant, name) == value for name, value in gains.items())
        return {"validation_error": (0.5 - 0.1 * better, 0.01, 8)}

    monkeypatch.setattr(learning, "tried", pretended)
    best, errors = learning.searched(QUICK, Settings(), minutes=2.0)
    kept = {name: value for name, value in gains.items() if name != "likelihood"}
    assert best == {"capsules": Way("capsules", **gains), "plain": Way("plain", **kept)}
    names = [name for kind in KINDS.values() for name in kind]
    own = ("margin_steps_50", "cross_entropy")
    assert [*errors["capsules"]] == ["as_it_is", *names]
    assert [*errors["plain"]] == ["as_it_is", *(name for name in names if name not in own)]
    assert errors["capsules"]["batch_64"][0] == pytest.approx(0.4)  # on top of the cut
    assert {minutes for _, minutes in tried} == {2.0}


def test_a_search_ends_with_learning_curves_of_both_networks(monkeypatch, tmp_path):
    monkeypatch.setattr(learning, "LEVELS", {"to_2": 2.0, "to_0": 0.0})
    settings = dict(kinds=("batches", "margins", "smoothing"), seeds=2, images=4, sizes=NETWORK)
    options = replace(QUICK, minutes=0.02)
    found, drawn = names_in_record("matrix-capsules/learning", options, tmp_path, **settings)
    networks = ("capsules", "plain", "capsules_searched", "plain_searched")
    numbers = ("test_error", "updates_per_second", "seeds_to_0", "seeds_to_2", "seconds_to_2")
    numbers += ("updates_to_2",)
    wanted = {f"{number}_{network}" for number in numbers for network in networks}
    both = ("as_it_is", "batch_16", "batch_64", "batch_128", "smoothed_labels")
    wanted |= {f"validation_{network}_{way}" for network in networks[:2] for way in both}
    assert found == wanted | {"validation_capsules_margin_steps_50"} and drawn == {""}


def test_a_kind_of_change_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match=r"unknown kind 'rate'.*rates"):
        learning.learning(QUICK, Settings(kinds=("rate",)))


def test_a_way_changes_images_network_and_training(miniature):
    changed = Way("capsules", 0, 8, 0.01, 50, "categorical", 0.2, "cosine", 100, 2)
    entry, data, how = learning.ready(Job("", changed, QUICK), Settings(sizes=NETWORK))
    assert (how["lr"], how["batch_size"], how["inputs"].transform.pixels) == (0.01, 8, 2)
    assert (how["pace"].schedule, how["pace"].warmup) == ("cosine", 100)
    assert (entry.model.margin_steps, entry.model.likelihood) == (50, "categorical")
    assert isinstance(entry.objective, Smoothed) and entry.objective.share == 0.2
    assert torch.equal(data.test.images, miniature.test.images)


def test_images_are_cut_at_every_side(monkeypatch):
    few = few_digits(8, 4, size=23)
    monkeypatch.setattr(learning, "load_dataset", lambda *_, **__: few)
    way = Job("", Way("plain", cut=2), QUICK)
    entry, data, _ = learning.ready(way, Settings(sizes=NETWORK))
    assert torch.equal(data.test.images, few.test.images[:, :, 2:21, 2:21])
    assert entry.model.scores(data.test.images).shape == (4, 10)
    assert not isinstance(entry.objective, Smoothed)


def test_replaced_labels_have_the_gradient_of_smoothed_labels():
    torch.manual_seed(0)
    entry = create("cnn", image_shape=(1, 17, 17), like="matrix-capsules", capsules=NETWORK)
    images, labels, share = torch.rand(1, 1, 17, 17).expand(4000, -1, -1, -1), torch.tensor(3), 0.4
    smoothed = Smoothed(entry.objective, 10, share)
    loss = smoothed.differentiable_loss(entry.model, entry.guide, images, labels.expand(4000))
    logs = entry.model.scores(images[:1]).log_softmax(1)[0].detach()
    target = torch.full((10,), share / 10)
    target[3] += 1 - share
    error = 5 * logs.std().item() / 4000**0.5
    assert loss.item() == pytest.approx(-(target @ logs).item(), abs=error)
    assert loss.item() != pytest.approx(-logs[3].item(), abs=error)
    with torch.no_grad():  # held-out labels are as they are
        found = smoothed.differentiable_loss(entry.model, entry.guide, images, labels.expand(4000))
    assert found.item() == pytest.approx(-logs[3].item(), rel=1e-4)
