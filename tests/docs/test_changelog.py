"""The table of names in the changelog: new names exist, and old ones are gone."""

import re
from pathlib import Path

import pytest

import capsule_zoo
from capsule_zoo import data, figures, guides, inference, models

CHANGELOG = (Path(__file__).parents[2] / "CHANGELOG.md").read_text()
FACES = (capsule_zoo, data, figures, guides, inference, models)
TABLE = CHANGELOG.partition("### Moving from 0.1.0")[2]
ROWS = re.findall(r"^\| (`.*`.*) \| (.*) \|$", TABLE, re.M)
CLASS = r"\b([A-Z]\w+)\("


def faces_of(name: str) -> list[str]:
    return [face.__name__ for face in FACES if name in face.__all__]


@pytest.mark.parametrize("old, new", [row for row in ROWS if re.search(CLASS, row[1])])
def test_classes_of_the_new_column_are_public(old, new):
    assert all(faces_of(name) for name in re.findall(CLASS, new)), new


def test_what_lost_its_name_is_public_no_more():
    gone = ("AmortizedPartWhole", "RoutingPartWhole", "AmortizedShapeCodes", "RoutingShapeCodes")
    for name in (*gone, "predictions"):
        assert any(f"`{name}(" in old for old, _ in ROWS) and not faces_of(name)
    assert not hasattr(models.Model, "with_discrete_presences")
