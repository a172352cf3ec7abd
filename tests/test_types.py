"""Type checkers know the attributes of models and guides, and refuse all others."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAD = """
from capsule_zoo.guides import PartWholeGuide, Guide
from capsule_zoo.models import PartWholeCapsules, VariationalAutoencoder
from capsule_zoo.registry import Entry

model = PartWholeCapsules(objects=3, parts=4)
guide = PartWholeGuide(model)
entry: Entry[PartWholeCapsules, PartWholeGuide]
"""
DECLARATIONS = """
class Own(Guide[VariationalAutoencoder]):
    def sizes(self) -> int:
        return self.model.latent + self.num_parameters

size: int = guide.model.levels[0].size
whole: PartWholeGuide = guide.with_scope("scene")
parts: int = entry.model.levels[1].size
wide = entry.guide.with_poses("normal")
"""
REFUSED = {
    "model.nonsense(5)": '"PartWholeCapsules" has no attribute "nonsense"',
    "guide.model.levelz": '"PartWholeCapsules" has no attribute "levelz"',
    "entry.model.levelz": '"PartWholeCapsules" has no attribute "levelz"',
    "entry.guide.with_pose(2)": '"PartWholeGuide" has no attribute "with_pose"',
    "guide.with_turn(2)": '"PartWholeGuide" has no attribute "with_turn"',
    "PartWholeGuide(VariationalAutoencoder())": 'expected "PartWholeCapsules"',
}


@pytest.mark.slow
def test_nonsense_is_refused_and_nothing_else(monkeypatch, tmp_path):
    mypy = pytest.importorskip("mypy.api")
    monkeypatch.chdir(ROOT)
    code = HEAD + DECLARATIONS + "\n".join(REFUSED)
    settings = ["--config-file", "setup.cfg", "--cache-dir", str(tmp_path)]
    output, failed, _ = mypy.run([*settings, "-c", code])
    assert not failed
    errors = [line for line in output.splitlines() if ": error: " in line]
    assert len(errors) == len(REFUSED), output
    for error, expected in zip(errors, REFUSED.values(), strict=True):
        assert expected in error
