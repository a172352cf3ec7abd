"""After training at too high a rate: the parameters of the last good check, or one clear line."""

import math
import traceback

import numpy as np
import pytest
import torch
from small_entries import check_refused, images_for, small_entry
from torch import nn

from capsule_zoo.inference import (
    Checks,
    Inputs,
    NonFiniteLoss,
    check_pair,
    classify,
    encode,
    error_rate,
    evaluate,
    fit,
    infer,
    posterior_predictive,
    reconstruct,
    sample,
)
from capsule_zoo.inference.posterior.refine import refine
from capsule_zoo.inference.posterior.widen import widen

QUIET = dict(checks=Checks(progress=False))


def make(name="vae"):
    entry = small_entry(name)
    return entry.model, entry.guide, images_for(entry, 8)


def values(*modules):
    return [value.clone() for module in modules for value in module.state_dict().values()]


def test_after_a_rate_that_is_too_high_the_pair_is_as_it_was():
    model, guide, images = make()
    before = values(model, guide)
    with pytest.raises(NonFiniteLoss, match="are as they were after step 0") as caught:
        fit(model, guide, images, steps=50, lr=1e6, **QUIET)
    assert caught.value.restored == 0 and "\n" not in str(caught.value)
    assert all(map(torch.equal, before, values(model, guide)))
    assert torch.isfinite(reconstruct(model, guide, images)).all()


@pytest.mark.parametrize(("bad", "restored"), [(1, None), (2, 0), (4, 0), (5, 3), (8, 6)])
def test_the_state_of_the_last_check_whose_next_loss_was_finite_is_restored(bad, restored):
    """Step 4 starts at the state of the check after step 3, so that check is not known as good."""
    model, guide, images = make()
    states = {}

    def keep(check):
        states[check.step] = values(model, guide)

    def poison(batch):
        poison.calls += 1
        if poison.calls == bad:
            nn.init.constant_(next(guide.parameters()), math.nan)
        return batch

    poison.calls, states[0] = 0, values(model, guide)
    checks = Checks(every=3, callbacks=[keep], progress=False)
    with pytest.raises(NonFiniteLoss, match=f"at step {bad}") as caught:
        fit(model, guide, images, steps=9, checks=checks, inputs=Inputs(poison))
    assert caught.value.restored == restored
    if restored is not None:
        assert all(map(torch.equal, states[restored], values(model, guide)))
        assert f"after step {restored}" in str(caught.value)


def test_a_resumed_run_that_fails_has_the_state_of_its_checkpoint(tmp_path):
    model, guide, images = make()
    path = tmp_path / "run.safetensors"
    fit(model, guide, images, steps=4, checks=Checks(checkpoint=path, progress=False))
    trained = values(model, guide)
    other, other_guide, _ = make()
    checks = Checks(resume=path, progress=False)
    with pytest.raises(NonFiniteLoss, match="as they were after step 4") as caught:
        fit(other, other_guide, images, steps=50, lr=1e6, checks=checks)
    assert caught.value.restored == 4
    assert all(map(torch.equal, trained, values(other, other_guide)))


CALLS = {
    "evaluate": evaluate,
    "check_pair": check_pair,
    "encode": encode,
    "reconstruct": reconstruct,
    "posterior_predictive": posterior_predictive,
    "refine": lambda *pair: refine(*pair, steps=1),
    "widen": lambda *pair: widen(*pair, steps=1),
    "fit": lambda *pair: fit(*pair, steps=1, **QUIET),
    "infer": lambda model, guide, images: infer(guide, images),
    "sample": lambda model, guide, images: sample(model, 2),
}


@pytest.mark.parametrize(("half", "value"), [("model", math.inf), ("guide", math.nan)])
@pytest.mark.parametrize("call", CALLS)
def test_a_ruined_pair_is_named_in_one_line(call, value, half):
    if (call, half) in {("infer", "model"), ("sample", "guide")}:
        pytest.skip("this half takes no part")
    model, guide, images = make()
    module = {"model": model, "guide": guide}[half]
    name, parameter = list(module.named_parameters())[1]
    nn.init.constant_(parameter.view(-1)[:1], value)
    ruined = (
        f"^{type(module).__name__} is ruined: its {name} holds values that are not finite.*load"
    )
    check_refused(lambda: CALLS[call](model, guide, images), ruined)


def test_a_running_statistic_that_is_nan_is_named():
    model, guide, images = make("part-whole")
    name, buffer = next(iter(guide.named_buffers()))
    buffer.fill_(math.nan)
    with pytest.raises(ValueError, match=f"is ruined: its {name} holds"):
        encode(model, guide, images)


def test_a_classifier_that_is_ruined_is_named():
    model, guide, images = make("cnn")
    next(model.parameters()).data.fill_(math.nan)
    for call in (
        lambda: classify(model, guide, images),
        lambda: error_rate(model, guide, (images, np.zeros(8, int))),
    ):
        with pytest.raises(ValueError, match="is ruined"):
            call()


@pytest.mark.parametrize(
    "call", ["check_pair", "evaluate", "encode", "reconstruct", "refine", "fit"]
)
def test_huge_parameters_give_one_line_and_no_tensors(call):
    """Finite parameters whose products are not: Pyro would print the tensors of a distribution."""
    model, guide, images = make("part-whole")
    for parameter in guide.parameters():
        nn.init.constant_(parameter, 1e30)
    pattern = (
        "no distribution takes.*lower lr|is not finite at site 'part_presence' for images 0"
        "|cannot run on these images: Expected parameter logits"
    )
    with pytest.raises(ValueError, match=pattern) as caught:
        CALLS[call](model, guide, images)
    assert len(str(caught.value).splitlines()) <= 2 and "tensor(" not in str(caught.value)
    text = "".join(traceback.format_exception(caught.value))
    assert call in ("check_pair", "evaluate", "fit") or "tensor(" not in text
