"""Entries are made, saved and loaded by name; an error reports the nearest valid name."""

import copy
import json
import shutil
from dataclasses import replace
from functools import partial, reduce

import numpy as np
import pytest
import torch
from pyro.infer import TraceMeanField_ELBO
from pyro.infer.autoguide import AutoNormal

from capsule_zoo import Entry, describe, registry
from capsule_zoo.guides import ConvolutionalEncoder, EMObjects, EMRouting, PartWholeGuide, Routing
from capsule_zoo.inference import (
    CheckpointError,
    IncompatibleGuide,
    SemiAmortized,
    check_pair,
    fit_guide,
    log_weights,
)
from capsule_zoo.inference.check import guides_made_for
from capsule_zoo.models import PartWholeCapsules, VariationalAutoencoder
from capsule_zoo.models.parts.painted_parts import Painting
from capsule_zoo.registry import (
    create,
    find_registration,
    list_models,
    load,
    pair_of,
    read_recipe,
    rebuild,
    register,
    save,
    save_entry,
    save_weights,
    small_settings,
    summary,
)


@pytest.fixture
def entry():
    return create("part-whole", **small_settings("part-whole"))


def test_entries_are_listed_by_pattern():
    assert "part-whole" in list_models()
    assert list_models() == sorted(list_models())
    assert "part-whole" in list_models("part*")
    assert list_models("no such*") == []


@pytest.mark.parametrize("name", list_models())
def test_every_entry_says_what_it_is(name):
    assert summary(name), "`list` shows it"


def test_an_unknown_name_meets_the_nearest():
    for look_up in (create, summary, small_settings):
        with pytest.raises(ValueError, match="did you mean 'part-whole'"):
            look_up("partwhole")


class Toy(VariationalAutoencoder):
    """A model of a test.

    Args:
        image_shape: (channels, height, width).
        latent: numbers of the code.
    """

    def __init__(self, image_shape: tuple[int, int, int] = (1, 8, 8), latent: int = 3) -> None:
        super().__init__(image_shape, latent, channels=4)


def again(entry):
    """Make the default guide once more."""
    return entry.make_guide("network")


def register_toy(name: str = "of-a-test", **parts: object) -> None:
    guides = {"network": ConvolutionalEncoder, "again": again}
    parts = dict(model=Toy, guides=guides, objective=TraceMeanField_ELBO) | parts
    register(name, **parts)


def test_a_name_is_registered_once(scratch):
    register_toy(small={"latent": 1}, data="stripes")
    assert "of-a-test" in list_models()
    assert small_settings("of-a-test") == {"latent": 1}
    assert summary("of-a-test") == "A model of a test."
    with pytest.raises(ValueError, match="registered already"):
        register_toy()
    for name in ("of_a_test", "Of-a-test", "of a test", ""):
        with pytest.raises(ValueError, match="lower case with hyphens"):
            register_toy(name)
    for guides in ({}, ConvolutionalEncoder):
        with pytest.raises(ValueError, match="register an entry with guides="):
            register_toy("another", guides=guides)


def test_an_entry_has_the_arguments_of_its_classes_as_settings(scratch):
    register_toy()
    settings = find_registration("of-a-test").arguments
    assert list(settings) == ["image_shape", "latent", "guide"]
    assert (
        settings["latent"].type == "int"
        and settings["latent"].description == "numbers of the code."
    )
    assert settings["guide"].inner["hidden"].default == 256
    entry = create("of-a-test", latent=2, guide=dict(hidden=5))
    assert isinstance(entry.model, Toy) and entry.model.latent == 2
    numbers = ConvolutionalEncoder(entry.model, 5).num_parameters
    assert entry.guide.num_parameters == entry.make_guide("network").num_parameters == numbers
    assert entry.use_guide("again").default_guide == "again"
    assert create("of-a-test", **{"guide.hidden": 5}).guide.num_parameters > 0
    for wrong, message in (
        (dict(latant=2), "did you mean 'latent'"),
        (dict(latent="2"), "latent of of-a-test must be a whole number"),
        (dict(guide=dict(hiden=2)), "of-a-test's guide 'hiden'; did you mean 'hidden'"),
        (dict(hidden=2), r"of its guide; give guide.hidden"),
    ):
        with pytest.raises(ValueError, match=message):
            create("of-a-test", **wrong)


def test_an_entry_needs_a_guide():
    with pytest.raises(ValueError, match="unknown default_guide ''; there are none"):
        Entry(VariationalAutoencoder((1, 8, 8)), {}, TraceMeanField_ELBO())


def test_settings_that_hold_settings_are_saved(scratch, tmp_path):
    routing_of_two = EMRouting(2)

    class Routed(PartWholeCapsules):
        """A model of a test."""

        def __init__(
            self,
            image_shape: tuple[int, int, int] = (1, 12, 12),
            painting: Painting = Painting(template_size=5),
            routing: Routing = routing_of_two,
        ) -> None:
            super().__init__(image_shape, objects=2, parts=3, painting=painting)
            self.routing = routing

    register("of-a-test", model=Routed, guides={"network": PartWholeGuide})
    small = dict(reader=dict(channels=6), above=dict(width=8, heads=2, blocks=1, inducing=3))
    entry = create("of-a-test", sigma_image=0.2, routing=EMRouting(3), guide=small)
    assert entry.model.painting == Painting(template_size=5, sigma_image=0.2)
    save_entry(entry, tmp_path / "run")
    twin = load(tmp_path / "run")
    assert twin.model.painting == entry.model.painting and twin.model.routing == EMRouting(3)


def test_the_default_guide_is_one_of_the_guides(entry):
    with pytest.raises(ValueError, match="did you mean 'delta'"):
        replace(entry, default_guide="delt")


@pytest.mark.parametrize(
    ("name", "entry", "preset"),
    [
        ("broadcast-autoencoder", "conditional-autoencoder", "broadcast"),
        ("generative-capsnet-continuous", "generative-capsnet", "continuous"),
        ("overlapping-capsule-network", "capsule-network", "overlapping"),
        ("overlapping-capsules", "recurrent-capsules", "overlapping"),
    ],
)
def test_an_entry_that_became_a_preset_says_which(name, entry, preset):
    message = f"{name!r} is a preset of {entry} since 0.3.*--set preset={preset}"
    for look_up in (create, describe, load, find_registration):
        with pytest.raises(ValueError, match=message):
            look_up(name)
    pair = create(entry, **small_settings(entry))
    config = {"entry": name, "pair": pair_of(pair.model, pair.guide)}
    with pytest.raises(ValueError, match=message):
        rebuild(config)


def test_a_preset_has_guides_and_pictures_of_its_own(tmp_path):
    entry = create("capsule-network", **small_settings("capsule-network", "overlapping"))
    assert [*entry.guides] == ["dynamic"] and [*entry.figures] == ["samples"]
    save_entry(entry, tmp_path)
    twin = load(tmp_path)
    assert type(twin.model) is type(entry.model) and [*twin.guides] == ["dynamic"]
    assert twin.settings["preset"] == "overlapping"
    assert describe(tmp_path).summary.startswith("Class capsules that separate two images")


def test_small_settings_are_not_shared():
    small_settings("part-whole")["objects"] = 99
    assert small_settings("part-whole")["objects"] != 99


def test_guides_go_by_name(entry):
    assert entry.make_guide("normal").pose == "normal"
    with pytest.raises(ValueError, match="did you mean 'normal'"):
        entry.make_guide("normall")


def test_a_guide_of_another_name_is_not_saved(entry, tmp_path):
    entry.guide = entry.make_guide("normal")
    with pytest.raises(ValueError, match=r"made as 'normal', .* 'delta'; call entry.use_guide"):
        save_entry(entry, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    save_entry(entry.use_guide("normal"), tmp_path / "run")
    assert load(tmp_path / "run").guide.pose == "normal"
    entry.guide = entry.make_guide("normal")
    save_entry(entry, tmp_path / "run")


def test_the_guide_that_is_named_is_used_whichever_the_entry_holds(entry):
    mine = entry.guide = entry.make_guide("normal")
    assert entry.use_guide("normal").guide is mine and entry.default_guide == "normal"
    entry.guide = entry.make_guide("delta")
    assert entry.use_guide("normal").guide.pose == "normal"
    entry.guide = entry.make_guide("routing")
    assert entry.use_guide("normal").guide.pose == "normal"


def test_an_entry_is_loaded_in_the_precision_in_which_it_was_saved(entry, tmp_path):
    for module in (entry.model.double(), entry.guide.double()):
        for parameter in module.parameters():
            parameter.data += 1e-12
    save_entry(entry, tmp_path)
    twin = load(tmp_path)
    for ours, theirs in ((entry.model, twin.model), (entry.guide, twin.guide)):
        pairs = zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)


def test_settings_may_be_numbers_of_numpy(tmp_path):
    sizes = {**small_settings("part-whole"), "objects": np.int64(2), "sigma_image": np.float32(0.5)}
    shape = tuple(np.array([1, 12, 10]))
    save_entry(create("part-whole", **{**sizes, "image_shape": shape}), tmp_path)
    twin = load(tmp_path)
    assert twin.settings["objects"] == 2 and twin.model.image_shape == (1, 12, 10)


def test_weights_load_by_name(entry, tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "WEIGHTS", tmp_path)
    save_weights(entry, tmp_path / "trained.json", {"data": "digits"})
    twin = load("trained")
    for role in ("model", "guide"):
        ours, theirs = getattr(entry, role).state_dict(), getattr(twin, role).state_dict()
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert twin.model.image_shape == entry.model.image_shape
    assert read_recipe("trained")["data"] == "digits"
    with pytest.raises(ValueError, match=r"did you mean 'trained'.*folder of a run"):
        load("trainet")


def test_any_pair_is_saved_and_loaded(entry, tmp_path):
    """Also one that no entry makes, and one that was loaded."""
    guide = entry.guide.with_above(partial(EMObjects, iterations=2)).with_poses("normal")
    save(entry.model, guide, tmp_path / "run", data="digits")
    twin = load(tmp_path / "run")
    above = twin.guide.infer_objects
    assert isinstance(above, EMObjects) and above.iterations == 2 and twin.guide.pose == "normal"
    assert twin.guide.model is twin.model and read_recipe(tmp_path / "run")["data"] == "digits"
    for module, other in ((entry.model, twin.model), (guide, twin.guide)):
        state = other.state_dict()
        assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())
    copied = twin.make_guide("saved")
    assert copied.model is twin.model and copied is not twin.guide
    save_entry(twin, tmp_path / "again")
    assert read_recipe(tmp_path / "again")["pair"] == read_recipe(tmp_path / "run")["pair"]


def test_a_guide_whose_start_would_be_lost_is_not_saved(entry, tmp_path):
    later = SemiAmortized(entry.guide, 2)
    with pytest.raises(ValueError, match=r"weights of its guide, a PartWholeGuide.*would be lost"):
        save(entry.model, later, tmp_path)
    assert not [*tmp_path.iterdir()]


def test_what_infers_objects_is_chosen_by_name(tmp_path):
    settings = small_settings("part-whole")
    readers = {"reader": settings["guide"]["reader"]}
    for above in ("EMObjects", EMObjects, {"class": "EMObjects"}, partial(EMObjects)):
        settings["guide"] = {**readers, "above": above}
        save_entry(create("part-whole", **settings), tmp_path)
        twin = load(tmp_path)
        for guide in (twin.guide, twin.make_guide("normal")):
            assert isinstance(guide.infer_objects, EMObjects)


def test_scenes_are_saved_with_their_trained_object_inside(tmp_path):
    small = dict(image_shape=(1, 5, 5), latent=2, channels=3, guide=dict(hidden=5))
    save_entry(create("vae", **small), tmp_path / "vae")
    scenes = create("scenes", image_shape=(1, 12, 10), thing=str(tmp_path / "vae"), size=6.0)
    save(scenes.model, scenes.guide, tmp_path / "pair")
    save_entry(scenes, tmp_path / "entry")
    shutil.rmtree(tmp_path / "vae")
    state = scenes.model.state_dict()
    for folder in ("pair", "entry"):
        twin = load(tmp_path / folder)
        assert all(torch.equal(t, state[name]) for name, t in twin.model.state_dict().items())
    assert type(twin.make_guide("recurrent").reader) is type(scenes.guide.reader)


def test_a_guide_of_pyro_is_not_saved(entry, tmp_path):
    with pytest.raises(ValueError, match=r"a guide of the zoo.*, not AutoNormal; fit_guide"):
        save(entry.model, AutoNormal(entry.model), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_mixture_of_fitted_guides_is_saved_and_loaded(tmp_path):
    entry = create("vae", **small_settings("vae"))
    images = torch.rand(2, *entry.model.image_shape)
    guide = fit_guide("mixture", entry.model, entry.guide, images, steps=2)
    save(entry.model, guide, tmp_path)
    twin, scores = load(tmp_path), []
    for pair in ((entry.model, guide), (twin.model, twin.guide)):
        torch.manual_seed(0)
        scores.append(log_weights(*pair, images)[0])
    torch.testing.assert_close(*scores, rtol=0, atol=0)


def test_a_guide_of_another_model_is_not_saved(entry, tmp_path):
    with pytest.raises(ValueError, match=r"another model.*deepcopy\(\(model, guide\)\)"):
        save(copy.deepcopy(entry.model), entry.guide, tmp_path / "run")
    assert not (tmp_path / "run").exists()


CHANGES: list[tuple[str, object, str]] = [  # a place in config.json, and what stands there
    ("pair.model.objects", 9, "does not fit"),
    ("pair.model.class", "PartHole", "did you mean"),
    ("pair.model.parents", 3, "unknown argument"),
    ("pair.model", [1, 2], "describes no pair"),
    ("pair.guide", {}, "describes no pair"),
    ("settings", {"guide": 3}, "guide of part-whole must be a mapping, not 3"),
    ("pair", None, "does not describe an entry"),
]


@pytest.mark.parametrize(("place", "value", "message"), CHANGES)
def test_a_description_of_other_values_is_refused(entry, tmp_path, place, value, message):
    save_entry(entry, tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    *outer, name = place.split(".")
    reduce(dict.__getitem__, outer, content)[name] = value
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


OLD = json.dumps({"entry": "part-whole", "sizes": {"objects": 2}, "guide": "delta"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "does not describe an entry"),
        ("[]", "does not describe an entry"),
        (OLD, r"a version before 0\.3 wrote it.*train it again"),
    ],
)
def test_a_damaged_description_is_refused(entry, tmp_path, text, message):
    save_entry(entry, tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_a_guide_that_does_not_fit_is_told_which_would():
    entry, other = (create(name, **small_settings(name)) for name in ("part-whole", "capsule-rbm"))
    images = torch.rand(2, *entry.model.image_shape)
    with pytest.raises(IncompatibleGuide) as refused:
        check_pair(entry.model, lambda images: None, images)
    assert "made for this model: PartWholeGuide." in str(refused.value)
    assert "Switches" not in str(refused.value)
    assert guides_made_for(other.model) == ["ExactSwitches", "MeanFieldSwitches"]
