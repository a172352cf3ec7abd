"""Sizes: `create` knows each by name and type, and reports the given and the allowed values."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from capsule_zoo import registry
from capsule_zoo.models import PartWholeCapsules
from capsule_zoo.registry import create, list_models, read_recipe, register, sizes_of, small_sizes
from capsule_zoo.runs.recipe import Recipe
from capsule_zoo.sizes import Size, Takes, fits, in_words, known_sizes, words_of

NAMES = list_models()


def every_size(name: str) -> Iterator[tuple[Size, str]]:
    """Yield every size of an entry, and every size inside a mapping with the mapping's name."""
    for size in sizes_of(name).values():
        yield size, ""
        for inner in size.inner.values():
            yield inner, size.name


def made_with(name: str, size: Size, outer: str, value: object) -> None:
    """Create the entry, small, with one size set."""
    sizes: dict[str, Any] = small_sizes(name)
    inner = {**sizes.get(outer, {}), size.name: value}
    create(name, **{**sizes, **({outer: inner} if outer else {size.name: value})})


@pytest.mark.parametrize("name", NAMES)
def test_every_small_size_and_default_is_known_and_of_its_type(name):
    known = {(outer, size.name): size for size, outer in every_size(name)}
    for size, value in small_sizes(name).items():
        assert fits(value, known["", size].hint)
        named = isinstance(value, Mapping) and known["", size].inner  # else another entry's sizes
        for inner in value if named else ():
            assert fits(value[inner], known[size, inner].hint)
    assert all(fits(size.default, size.hint) for size in known.values())
    assert all(size.hint is not Any for size in known.values())


@pytest.mark.parametrize("name", NAMES)
def test_a_size_of_another_type_is_refused_by_name(name):
    for size, outer in every_size(name):
        for wrong in ("[4,8", object(), float("nan"), [("a",)]):
            if not fits(wrong, size.hint):
                with pytest.raises(ValueError, match=rf"{size.name} of .* must be"):
                    made_with(name, size, outer, wrong)


@pytest.mark.parametrize("name", NAMES)
def test_a_negative_size_is_refused_by_name(name):
    for size, outer in every_size(name):
        wrong = {fits(v, size.hint): v for v in (-4, -0.5, (-4, -4), (-4, -4, -4))}.get(True)
        if wrong is not None:
            with pytest.raises(ValueError, match=size.name):
                made_with(name, size, outer, wrong)


@pytest.mark.parametrize("name", NAMES)
def test_every_size_may_be_given_at_its_small_or_default_value(name):
    """Listed sizes can be given: no name clashes with a name that the factory sets itself."""
    given = {size.name: size.default for size in sizes_of(name).values() if not size.inner}
    entry = create(name, **{**given, **small_sizes(name)})
    assert entry.sizes.keys() >= given.keys()


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (dict(objcts=4), "unknown size of part-whole 'objcts'; did you mean 'objects'"),
        (dict(objects="four"), "objects of part-whole must be a whole number, not 'four'"),
        (dict(objects=2.5), "objects of part-whole must be a whole number, not 2.5"),
        (dict(objects=True), "objects of part-whole must be a whole number, not True"),
        (dict(objects=-4), "objects must be at least 1, not -4"),
        (dict(layers="[4,8"), r"layers of part-whole must be several whole numbers .*\[4,8'"),
        (dict(image_shape=(28, 28)), "image_shape of part-whole must be 3 whole numbers"),
        (dict(width=8), r"'width' is not a size of part-whole itself.*guide=\{'width'"),
        (dict(guide={"width": 0}), "width must be at least 1, not 0"),
        (dict(guide={"widht": 8}), "part-whole's guide 'widht'; did you mean 'width'"),
        (dict(guide={"width": "8"}), "width of part-whole's guide must be a whole"),
        (dict(guide=8), "guide of part-whole must be a mapping"),
    ],
)
def test_what_was_typed_is_said_with_what_is_allowed(sizes, said):
    with pytest.raises(ValueError, match=said):
        create("part-whole", **sizes)


@pytest.mark.parametrize("weights", sorted(p.stem for p in registry.WEIGHTS.glob("*.json")))
def test_the_sizes_of_trained_weights_are_still_taken(weights):
    recipe = read_recipe(weights)
    assert registry.rebuild(Recipe.read(recipe)).sizes.keys() >= recipe["sizes"].keys()


def test_lists_stand_for_tuples_as_json_has_them():
    assert create("capsule-helmholtz", image_shape=[1, 4, 4], capsules=[2, 3]).model is not None


def test_a_factory_that_says_nothing_of_its_sizes_takes_any(scratch):
    @register("open-ended")
    def factory(width: int = 3, **sizes: Any) -> Any:
        raise TypeError(f"got {width} and {sizes}")

    with pytest.raises(ValueError, match=r"got 3 and \{'anything': 'at all'\}"):
        create("open-ended", anything="at all")
    with pytest.raises(ValueError, match="width of open-ended must be a whole number"):
        create("open-ended", width="3")


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

    def factory(tall: bool = True, **sizes: Any) -> None: ...

    found = known_sizes(factory, {"sizes": Takes(Child, defaults={"deep": 7})})
    assert {n: (s.default, s.type, s.what) for n, s in found.items()} == {
        "tall": (True, "bool", "in pixels."),
        "deep": (7, "int", "how large, in all."),
        "wide": (None, "float | None", "how large, in all."),
    }
    assert "deep" not in known_sizes(factory, {"sizes": Takes(Child, without=("deep",))})
    assert words_of(None) == {}


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (int | None, "a whole number or None"),
        (tuple[int, int], "2 whole numbers such as (8, 8)"),
        (tuple[float, ...], "several numbers such as (0.5, 0.5)"),
        (Mapping[str, Any], "a mapping from names to values"),
        (bool, "True or False"),
    ],
)
def test_annotations_are_put_into_words(hint, words):
    assert in_words(hint) == words


@pytest.mark.parametrize("shape", [(20,), (20, 20), (2, 20, 20)])
def test_the_shape_of_images_is_three_numbers(shape):
    with pytest.raises(ValueError, match=r"image_shape must be \(1 or 3 channels, height, width"):
        PartWholeCapsules(shape)


@pytest.mark.parametrize("number", [-1, 0])
@pytest.mark.parametrize("name", NAMES)
def test_a_batch_without_images_is_refused(name, number):
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        create(name, **small_sizes(name)).model(batch_size=number)
