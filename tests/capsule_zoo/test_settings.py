"""Settings: `create` knows each by name and type, and reports the given and the allowed values."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from capsule_zoo.guides import DynamicRouting, EMRouting, VBRouting
from capsule_zoo.models import PartWholeCapsules, RecurrentCapsules, Settings
from capsule_zoo.models.parts.painted_parts import Painting
from capsule_zoo.registry import create, find_registration, list_models, small_settings
from capsule_zoo.settings import (
    arguments_of,
    configure,
    fits,
    flat,
    flat_arguments,
    nest_settings,
    words_of,
)

NAMES = list_models()


def arguments(name: str) -> dict[str, Any]:
    """Return the settings of an entry by dotted name."""
    return flat_arguments(find_registration(name).arguments)


def small_with(name: str, setting: str, value: object) -> dict[str, Any]:
    """Return an entry's small settings by dotted names, with one changed."""
    return {**flat(small_settings(name)), setting: value}


@pytest.mark.parametrize("name", NAMES)
def test_every_small_setting_and_default_is_known_and_of_its_type(name):
    parameters = arguments(name)
    settings = nest_settings(small_settings(name), find_registration(name).arguments, name)
    for setting, value in flat(settings).items():
        if not setting.startswith("thing_settings."):  # of another entry
            assert fits(value, parameters[setting].hint)
    assert all(fits(argument.default, argument.hint) for argument in parameters.values())
    assert all(argument.hint is not Any for argument in parameters.values())


@pytest.mark.parametrize("name", NAMES)
def test_a_value_of_another_type_is_refused_by_name(name):
    for setting, argument in arguments(name).items():
        for wrong in ("[4,8", object(), float("nan"), [("a",)]):
            if not fits(wrong, argument.hint):
                with pytest.raises(ValueError, match=rf"{argument.name} of .* must be"):
                    create(name, **small_with(name, setting, wrong))


@pytest.mark.parametrize("name", NAMES)
def test_a_negative_number_is_refused_by_name(name):
    for setting, argument in arguments(name).items():
        wrong = {fits(v, argument.hint): v for v in (-4, -0.5, (-4, -4), (-4, -4, -4))}.get(True)
        if wrong is not None and setting not in ("identity", "guide.types"):  # of "paper" alone
            with pytest.raises(ValueError, match=argument.name):
                entry = create(name, **small_with(name, setting, wrong))
                if setting.startswith("guides."):
                    entry.make_guide(setting.split(".")[1])


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_may_be_given_at_its_default_value(name):
    defaults = {setting: argument.default for setting, argument in arguments(name).items()}
    assert create(name, **defaults).settings.keys() >= {"image_shape"} & defaults.keys()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(objcts=4), "unknown setting of part-whole 'objcts'; did you mean 'objects'"),
        (dict(objects="four"), "objects of part-whole must be a whole number, not 'four'"),
        (dict(objects=2.5), "objects of part-whole must be a whole number, not 2.5"),
        (dict(objects=True), "objects of part-whole must be a whole number, not True"),
        (dict(objects=-4), "objects must be at least 1, not -4"),
        (dict(layers="[4,8"), r"layers of part-whole must be several whole numbers .*\[4,8'"),
        (dict(image_shape=(28, 28)), "image_shape of part-whole must be 3 whole numbers"),
        (dict(width=8), r"'width' is not a setting of part-whole itself but of its guide"),
        (dict(guide={"width": 0}), "width must be at least 1, not 0"),
        (dict(guide={"reader.chanels": 8}), "guide's reader 'chanels'; did you mean 'channels'"),
        (dict(guide={"width": "8"}), "width of part-whole's guide's above must be a whole"),
        (dict(guide=8), "guide of part-whole must be a mapping"),
        (dict(painting=8), "painting of part-whole must be Painting, not 8"),
        (dict(painting={"class": "Paintin"}), "unknown class 'Paintin'; did you mean 'Painting'"),
        ({"painting.size": 3}, "unknown setting of part-whole's painting 'size'"),
    ],
)
def test_an_error_has_what_was_given_and_what_is_allowed(settings, message):
    with pytest.raises(ValueError, match=message):
        create("part-whole", **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"painting.template_size": 7},
        {"template_size": 7},
        {"painting": {"template_size": 7}},
        {"painting": Painting(template_size=7)},
    ],
)
def test_one_setting_has_a_dotted_name_of_which_the_end_is_enough(settings):
    assert configure(PartWholeCapsules, **settings).painting == Painting(template_size=7)


def test_a_setting_of_two_arguments_is_given_by_its_whole_name():
    @dataclass(frozen=True)
    class Width(Settings):
        width: int = 3

    def both(one: Width = Width(), other: Width = Width(4)) -> tuple[Width, Width]:
        return one, other

    with pytest.raises(ValueError, match=r"several arguments.*one\.width or other\.width"):
        configure(both, width=5)
    assert configure(both, **{"other.width": 5}) == (Width(3), Width(5))


def test_settings_may_be_of_another_class():
    routing = create("matrix-capsules", routing="VBRouting").model.classes.routing
    assert routing == VBRouting()
    settings = {"routing": {"class": "DynamicRouting", "iterations": 1}}
    assert create("matrix-capsules", **settings).model.classes.routing == DynamicRouting(1)
    assert create("matrix-capsules", iterations=5).model.classes.routing == EMRouting(5)
    assert create("recurrent-capsules", routing=None).model.arguments["routing"] is None


def test_arguments_that_a_partial_fixes_are_defaults():
    fixed = partial(RecurrentCapsules, routing=EMRouting(2), steps=3)
    settings = arguments_of(fixed)
    assert settings["steps"].default == 3 and settings["routing"].inner["iterations"].default == 2
    assert configure(fixed, **{"routing.iterations": 1}).arguments["routing"] == EMRouting(1)


def test_a_preset_replaces_defaults():
    full = create("matrix-capsules", preset="full")
    assert full.model.num_parameters > 4 * create("matrix-capsules").model.num_parameters
    with pytest.raises(ValueError, match="unknown preset 'ful'; did you mean 'full'"):
        create("matrix-capsules", preset="ful")


def test_lists_stand_for_tuples_as_json_has_them():
    assert create("capsule-helmholtz", image_shape=[1, 4, 4], capsules=[2, 3]).model is not None


def test_options_are_followed_to_the_class_that_takes_no_more():
    class Base:
        """Base.

        Args:
            deep, wide: how large,
                in all.

        Raises:
            ValueError: never.
        """

        def __init__(self, deep: int = 1, wide: float | None = None) -> None: ...

    class Child(Base):
        """Child.

        Args:
            tall: in pixels.
            options: of `Base`.
        """

        def __init__(self, model: object, tall: bool = False, **options: Any) -> None: ...

    settings = arguments_of(partial(Child, deep=7), leading=1)
    assert {n: (a.default, a.type, a.description) for n, a in settings.items()} == {
        "tall": (False, "bool", "in pixels."),
        "deep": (7, "int", "how large, in all."),
        "wide": (None, "float | None", "how large, in all."),
    }
    assert words_of(None) == {}


@pytest.mark.parametrize("shape", [(20,), (20, 20), (2, 20, 20)])
def test_the_shape_of_images_is_three_numbers(shape):
    with pytest.raises(ValueError, match=r"image_shape must be \(1 or 3 channels, height, width"):
        PartWholeCapsules(shape)


@pytest.mark.parametrize("number", [-1, 0])
@pytest.mark.parametrize("name", NAMES)
def test_a_batch_without_images_is_refused(name, number):
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        create(name, **small_settings(name)).model(batch_size=number)
