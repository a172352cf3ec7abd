"""Views: a moved handle has the given numbers, its children follow, the model renders the state."""

from itertools import pairwise

import pyro
import pytest
import torch
from torch.testing import assert_close

from capsule_zoo.data import MissingData, Shifts
from capsule_zoo.explore import sources
from capsule_zoo.explore.sources import open_source, view_of, viewable
from capsule_zoo.guides import ConditionalEncoder, FreeForm, KnownLatents
from capsule_zoo.inference import intervene
from capsule_zoo.inference.evaluation.ancestral import infer
from capsule_zoo.models import Capsules, GenerativeCapsNet, PartWholeCapsules
from capsule_zoo.models.generative_capsnet import Parts
from capsule_zoo.models.networks.on_request import leaky_sigmoid
from capsule_zoo.models.parts import poses
from capsule_zoo.models.parts.painted_parts import Painting
from capsule_zoo.models.parts.parent_selection import Belonging
from capsule_zoo.registry import create, small_settings
from capsule_zoo.zoo.generative_capsnet.view import ASKED, CODE, REQUEST, RequestView
from capsule_zoo.zoo.part_whole.view import PartWholeView


def part_whole_view(layers=(2, 4), off=(), types=0):
    """Return a view whose guide gives fixed poses, with all capsules present except `off`."""
    model = PartWholeCapsules(
        (1, 12, 12),
        layers=layers,
        types=types,
        painting=Painting(template_size=5),
        belonging=Belonging(epsilon=1e-6),
    )
    torch.nn.init.normal_(model.template_logits, std=3)
    image = torch.rand(1, 1, 12, 12)
    guide = FreeForm(model, image)
    for level in model.levels:
        torch.nn.init.constant_(guide.logits[f"{level.name}_presence"], 30.0)
    for name, index in off:
        guide.logits[f"{name}_presence"].data[0, index] = -30.0
    view = PartWholeView(model, guide)
    view.read(image)
    return view


def request_view(**sizes):
    model = GenerativeCapsNet((1, 8, 12), kinds=3, pose=2, parts=4, maps=3, channels=4, **sizes)
    torch.nn.init.zeros_(model.canvas.upsample.paint.bias)  # gray: black pictures are all alike
    view = RequestView(model, ConditionalEncoder(model, channels=3, hidden=6))
    view.read(torch.rand(1, 1, 8, 12))
    return view


@pytest.fixture(params=viewable())
def any_view(request):
    view = view_of(create(request.param, **small_settings(request.param)))
    view.read(torch.rand(1, *view.image_shape))
    return view


def test_a_number_that_is_set_is_read_back_and_reset_undoes_it(any_view):
    first, handles = any_view.mean_image(), len(any_view.handles())
    for handle in range(handles):
        for name, control in any_view.controls(handle).items():
            wanted = control.low + round(0.7 * (control.high - control.low))
            wanted = min(wanted, control.high)
            any_view.change(handle, name, wanted)
            assert any_view.controls(handle)[name].value == pytest.approx(wanted, abs=1e-3)
    assert not torch.equal(any_view.mean_image(), first)
    any_view.reset()
    assert torch.equal(any_view.mean_image(), first)
    assert any_view.mean_image().shape == (1, *any_view.image_shape)


def test_images_of_another_size_or_number_are_refused(any_view):
    with pytest.raises(ValueError, match="images must be"):
        any_view.read(torch.rand(1, 1, 3, 3))
    before = any_view.mean_image()
    with pytest.raises(ValueError, match="one image, not 2"):
        any_view.read(torch.rand(2, *any_view.image_shape))
    assert torch.equal(any_view.mean_image(), before)
    any_view.read(any_view.image.double())
    assert torch.equal(any_view.mean_image(), before)


def test_unknown_numbers_modes_and_values_are_refused(any_view):
    before, name = any_view.mean_image(), next(iter(any_view.controls(0)))
    with pytest.raises(ValueError, match="unknown number of the handle 'colour'"):
        any_view.change(0, "colour", 1.0)
    with pytest.raises(ValueError, match=f"{name} must be a finite number, not nan"):
        any_view.change(0, name, float("nan"))
    with pytest.raises(ValueError, match="mode must be one of"):
        any_view.set_mode("as it was")
    assert torch.equal(any_view.mean_image(), before)


def test_refining_says_what_it_gained(any_view):
    message = any_view.refine(steps=2)
    assert message.startswith("refined by 2 steps") and "-" not in message


@pytest.mark.parametrize("make", [lambda: part_whole_view(off=[("part", 0)]), request_view])
def test_reset_goes_back_to_what_was_inferred_however_often_it_was_refined(make):
    view = make()
    read, mean_image = view.state, view.mean_image()
    view.refine(steps=3)
    refined = view.mean_image()
    assert not torch.equal(refined, mean_image)
    for mode in reversed(view.modes):  # "posterior" again is what was refined, moved by nobody
        view.set_mode(mode)
    assert_close(view.mean_image(), refined)
    view.refine(steps=3)
    view.reset()
    assert view.state is read and torch.equal(view.mean_image(), mean_image)


@pytest.mark.parametrize("make", [part_whole_view, request_view])
def test_a_second_refinement_goes_on_from_the_first(make):
    view = make()
    read = view.mean_image()
    view.refine(steps=2)
    first = view.mean_image()
    assert not torch.equal(first, read)
    assert view.refine(steps=0).endswith(" 0.0 nats higher")
    assert_close(view.mean_image(), first)


def test_in_a_counterfactual_capsules_below_keep_their_noise():
    view = part_whole_view((2, 4, 6))
    model, mean_image = view.model, view.mean_image()
    view.set_mode("counterfactual")
    assert_close(view.mean_image(), mean_image, atol=1e-5, rtol=0)  # nothing has changed yet
    handle = view.handles().index(next(name for name in view.handles() if name.startswith("obj")))
    view.drag(handle, (0.0, 0.0), (0.4, -0.2))
    placed, top = view.place_capsules(), view.levels[0]
    do = {"object_pose": placed.pose[None, top], "object_presence": placed.presence[None, top]}
    drawn = infer(view.guide, view.image)
    counterfactual = intervene(model, KnownLatents(model, drawn), view.image, do).latents
    assert not torch.equal(do["object_pose"], drawn["object_pose"])
    for level, place in zip(model.levels, view.levels, strict=True):
        assert_close(
            placed.pose[place], counterfactual[f"{level.name}_pose"][0, 0], atol=1e-4, rtol=1e-4
        )
    view.change(handle, "presence", 0.2)  # of the discrete model: off
    assert view.controls(handle)["presence"].value == 0.0
    view.reset()
    assert torch.equal(view.mean_image(), mean_image)


@pytest.mark.parametrize("layers", [(2, 4), (2, 3, 4)])
def test_what_was_inferred_is_painted_as_the_model_renders_it(layers):
    view = part_whole_view(layers, off=[("part", 0)])
    drawn = infer(view.guide, view.image)
    assert_close(
        view.mean_image(),
        view.model.render(Capsules(drawn["part_presence"], drawn["part_pose"])),
        atol=1e-4,
        rtol=0,
    )
    distribution = torch.distributions.Normal(view.mean_image(), view.model.sigma_image)
    assert view.log_likelihood() == pytest.approx(
        distribution.log_prob(view.image).sum().item(), rel=1e-5
    )


@pytest.mark.parametrize("layers", [(2, 4), (2, 3, 4)])
def test_whatever_belongs_to_an_object_follows_it_and_nothing_else_moves(layers):
    view = part_whole_view(layers)
    before = view.place_capsules().pose
    view.change(0, "angle", 30.0)
    view.change(0, "x", 0.25)
    after = view.place_capsules().pose
    motion = poses.compose(after[0], poses.inverse(before[0]))
    mine = torch.tensor([view.root(i) == 0 for i in range(len(before))])
    assert 1 < mine.sum() < len(mine)
    assert_close(after[mine], poses.compose(motion, before[mine]), atol=1e-4, rtol=1e-4)
    assert torch.equal(after[~mine], before[~mine])


def test_parts_are_as_much_there_as_their_object():
    view = part_whole_view()
    parts = view.levels[-1]
    mine = view.state["parent"][parts] == 0
    assert 0 < mine.sum() < len(mine)
    view.change(0, "presence", 0.25)
    assert_close(view.place_capsules().presence[parts], torch.where(mine, 0.25, 1.0))
    pose = view.place_capsules().pose[None, parts]
    expected = view.model.render(Capsules(torch.where(mine, 0.25, 1.0)[None], pose))
    assert torch.equal(view.mean_image(), expected)


@pytest.mark.parametrize(
    ("layers", "types"), [((2, 4), 0), ((2, 3, 4), 0), ((2, 4), 3), ((2, 3, 4), 3)]
)
def test_at_the_prior_mean_every_capsule_is_where_its_likeliest_parent_votes(layers, types):
    view = part_whole_view(layers, types=types)
    for selection in view.model.selections:
        torch.nn.init.normal_(selection.log_affinity)
    view.set_mode("prior mean")
    for off in (None, 0):
        if off is not None:
            view.change(off, "presence", 0.0)
        placed = view.place_capsules()
        levels = zip(pairwise(view.levels), view.model.selections, strict=True)
        for (above, below), selection in levels:
            parent = torch.arange(selection.log_affinity.shape[1]) // selection.types
            weight = placed.presence[above][parent].log() + selection.log_affinity
            best = weight.argmax(-1)
            frame = placed.pose[above][parent[best]]
            relative = torch.eye(3)[:2].flatten() + selection.transform
            child = torch.arange(len(best))
            vote = poses.compose(frame, relative[child, best])
            assert_close(placed.pose[below], vote, atol=1e-4, rtol=1e-4)
            probability = selection.presence_logits.sigmoid()[child, best]
            expected = placed.presence[above][parent[best]] * probability
            assert_close(placed.presence[below], expected)
    view.set_mode("posterior")
    view.change(0, "presence", 1.0)
    assert_close(view.place_capsules().pose, view.read_state["pose"])


def test_a_capsule_that_is_dragged_takes_its_frame_along():
    view = part_whole_view()
    before = view.outline(0)
    view.drag(0, (0.1, 0.2), (0.4, 0.1))
    assert_close(view.outline(0), before + torch.tensor([0.3, -0.1]))


def test_the_part_that_is_seen_at_a_place_is_grabbed_or_its_object():
    view = part_whole_view(off=[("part", 1), ("part", 2), ("part", 3)])
    part = view.levels[-1].start
    torch.nn.init.constant_(view.model.template_logits, 5.0)
    view.move(part, torch.tensor([0.2, 0.0, 0.5, 0.0, 0.2, -0.5]))
    assert view.grab((0.5, -0.5), part=True) == part
    assert view.grab((0.5, -0.5), part=False) == view.root(part) < part
    assert view.grab((-0.5, 0.5), part=True) is None and view.grab((2.0, 0.0), part=True) is None
    assert view.pixel_at((-1.0, 0.99)) == (11, 0) and view.pixel_at((-1.01, 0.99)) is None


@pytest.mark.parametrize("address", ["fixed", "learned"])
def test_a_part_that_is_moved_is_routed_to_its_new_address(address):
    view = request_view(address=address)
    model, state = view.model, view.state
    asked = view.requests.numbers(state[ASKED])
    latents = {site: value for site, value in state.items() if site != ASKED}
    parts = model.capsules(latents, asked)
    moved = parts.address.clone()
    moved[0, 1, 0] = 0.5
    name = next(iter(view.controls(3)))
    view.change(3, name, 0.5)
    expected = leaky_sigmoid(model.canvas(Parts(moved, parts.activation)))
    assert_close(view.mean_image(), expected)


@pytest.mark.parametrize("identity", [(1.0, 0.0), (0.0, 0.0)])
def test_the_model_paints_what_is_requested_and_of_which_kind(identity):
    view = request_view(identity=identity)
    parameters = torch.tensor([[30.0] if view.rotates else [2.0, -1.0]])
    for name, value in zip(view.controls(REQUEST), parameters[0].tolist(), strict=True):
        view.change(REQUEST, name, value)
    view.change(CODE, "kind", 2)
    latents = {**view.read_state, "object_kind": torch.tensor([[0.0, 0.0, 1.0]])}
    del latents[ASKED]
    expected = view.model.mean_image(latents, view.requests.numbers(parameters))
    assert_close(view.mean_image(), expected)


def test_a_hand_turns_and_shifts_the_request_as_it_moves():
    rotated = request_view()
    begin = rotated.controls(REQUEST)["angle"].value
    rotated.drag(REQUEST, (1.0, 0.0), (0.0, -1.0))  # from the right to the top
    assert (rotated.controls(REQUEST)["angle"].value - begin - 90) % 360 == pytest.approx(0)
    shifted = request_view(identity=Shifts.identity)
    begin = shifted.state[ASKED]
    shifted.drag(REQUEST, (0.0, 0.0), (0.5, -0.25))  # of 12 columns and 8 rows
    assert_close(shifted.state[ASKED] - begin, torch.tensor([[3.0, -1.0]]))


def test_the_part_that_is_nearest_is_grabbed_and_dragged():
    view = request_view()
    view.change(4, "row", 1.0)
    view.change(4, "column", -1.0)  # the first cell of the last row, of 2x3 cells
    assert_close(view.outline(4).mean(0), torch.tensor([-2 / 3, 1 / 2]))
    assert view.grab((-0.66, 0.5), part=True) == 4 and view.grab((-0.66, 0.5), part=False) == 0
    before = view.outline(4)
    view.drag(4, (0.0, 0.0), (0.25, -0.5))
    assert_close(view.outline(4), before + torch.tensor([0.25, -0.5]))


def test_shifts_reach_as_far_as_the_window_can_go():
    model = GenerativeCapsNet((1, 12, 16), identity=Shifts.identity)
    for window, reach in [((6, 8), 4.0), (None, 20.0)]:
        view = RequestView(model, ConditionalEncoder(model, window=window))
        assert view.requests == Shifts(reach)


def test_a_model_without_a_view_is_refused_with_those_that_have_one():
    pyro.set_rng_seed(0)
    with pytest.raises(ValueError, match="no view of capsule-rbm") as refused:
        view_of(create("capsule-rbm", **small_settings("capsule-rbm")))
    listed = str(refused.value).partition("have one: ")[2].split(", ")
    assert listed == viewable() and {"part-whole", "generative-capsnet"} < set(listed)


@pytest.mark.parametrize("name", ["part-whole-mnist", "part-whole-affnist"])
def test_without_its_images_an_entry_shows_digits(name, monkeypatch):
    def absent(*_, **__):
        raise MissingData("no readable MNIST")

    monkeypatch.setattr(sources, "open_run", absent)
    view, images, title = open_source(name)
    assert images.shape[1:] == view.model.image_shape and len(images) == 400
    assert "scikit-learn's digits" in title
    with pytest.raises(MissingData, match="no readable MNIST"):
        open_source(name, data="mnist")
