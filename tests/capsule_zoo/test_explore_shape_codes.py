"""The view of shape codes: inferred values are painted, codes bend, kinds replace, parts follow."""

import pytest
import torch
from torch.testing import assert_close

from capsule_zoo.explore.sources import view_of
from capsule_zoo.guides import KnownLatents
from capsule_zoo.inference import intervene
from capsule_zoo.inference.evaluation.ancestral import infer
from capsule_zoo.models import Capsules
from capsule_zoo.models.parts import poses
from capsule_zoo.registry import create, small_settings
from capsule_zoo.zoo.shape_codes.view import OBJECT


@pytest.fixture
def view():
    torch.manual_seed(0)
    entry = create("shape-codes", **small_settings("shape-codes"))
    torch.nn.init.normal_(entry.model.template_logits, std=3)
    torch.nn.init.normal_(entry.model.shapes.presence_logits, std=2)
    view = view_of(entry)
    view.read(torch.rand(1, *view.image_shape))
    return view


def test_what_was_inferred_is_painted_as_the_model_renders_it(view):
    drawn = infer(view.guide, view.image)
    read = view.model.render(Capsules(drawn["part_presence"], drawn["part_pose"]))
    assert_close(view.mean_image(), read, atol=1e-4, rtol=0)


def votes(view) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the model's own votes and logits for the state of a view."""
    state = view.state
    pose, code = state["pose"][None, :1], state["code"][None, None]
    pose, logits = view.model.shapes.votes(state["kind"][None], pose, code)
    return pose[0, 0].detach(), logits[0, 0].detach()


def away(view) -> torch.Tensor:
    """Return the distances of parts from the votes of the object, in its frame."""
    frame = poses.inverse(view.state["pose"][OBJECT])
    return poses.compose(frame, view.parts().pose[0]) - poses.compose(frame, votes(view)[0])


def test_parts_keep_their_distance_from_the_votes_while_the_code_bends_them(view):
    before, first = away(view), view.parts().pose
    view.change(OBJECT, "code[1]", 2.0)
    assert view.controls(OBJECT)["code[1]"].value == 2.0
    assert not torch.equal(view.parts().pose, first)
    assert_close(away(view), before, atol=1e-4, rtol=1e-4)


def test_an_object_takes_its_parts_along_and_a_part_moves_alone(view):
    before, frame = view.parts().pose[0], view.state["pose"][OBJECT]
    view.change(OBJECT, "angle", 40.0)
    motion = poses.compose(view.state["pose"][OBJECT], poses.inverse(frame))
    assert_close(view.parts().pose[0], poses.compose(motion, before), atol=1e-4, rtol=1e-4)
    held = view.parts().pose[0].clone()
    view.drag(2, (0.0, 0.0), (0.25, -0.125))
    held[1, 2::3] += torch.tensor([0.25, -0.125])
    assert_close(view.parts().pose[0], held, atol=1e-4, rtol=1e-4)


def test_at_the_prior_mean_parts_are_where_the_object_votes_whatever_its_code_and_kind(view):
    def expected():
        pose, logits = votes(view)
        assert_close(view.parts().pose[0], pose, atol=1e-5, rtol=1e-5)
        assert_close(view.parts().presence[0], logits.sigmoid())

    read, before = view.state, away(view)
    view.set_mode("prior mean")
    expected()
    view.change(OBJECT, "code[0]", -1.5)
    expected()
    view.set_mode("posterior")
    assert_close(away(view), before, atol=1e-4, rtol=1e-4)
    assert torch.equal(view.state["presence"], read["presence"])
    view.change(OBJECT, "kind", 1 - int(read["kind"]))
    expected()
    assert view.handles()[OBJECT] == f"object (kind {1 - int(read['kind'])})"
    view.set_mode("posterior")  # what was inferred belongs to the other kind
    expected()


def test_in_a_counterfactual_parts_keep_their_noise_while_the_object_changes(view):
    read, mean_image = view.state, view.mean_image()
    view.set_mode("counterfactual")
    assert_close(view.mean_image(), mean_image, atol=1e-5, rtol=0)  # nothing has changed yet
    view.change(OBJECT, "code[0]", 2.5)
    view.change(OBJECT, "kind", 1 - int(read["kind"]))
    view.change(OBJECT, "x", 0.3)
    state = view.state
    sites = {"kind": state["kind"], "pose": state["pose"][OBJECT], "code": state["code"]}
    do = {f"object_{name}": value for name, value in sites.items()}
    posterior = KnownLatents(view.model, infer(view.guide, view.image))
    counterfactual = intervene(view.model, posterior, view.image, do).latents
    assert_close(view.parts().presence, counterfactual["part_presence"][0])
    assert_close(view.parts().pose, counterfactual["part_pose"][0], atol=1e-5, rtol=1e-5)
    assert state["kind"] != read["kind"] and not torch.equal(state["pose"], read["pose"])
    view.reset()
    assert torch.equal(view.mean_image(), mean_image)


def test_a_part_is_grabbed_or_the_object(view):
    torch.nn.init.constant_(view.model.template_logits, 5.0)
    for part in (2, 3):
        view.change(part, "presence", 0.0)
    view.move(1, torch.tensor([0.2, 0.0, 0.5, 0.0, 0.2, -0.5]))
    view.change(1, "presence", 1.0)
    assert view.grab((0.5, -0.5), part=True) == 1
    assert view.grab((0.5, -0.5), part=False) == OBJECT
    assert view.grab((-0.5, 0.5), part=True) is None
