"""Several threads may use the zoo at once: they take turns, and each gets what it gets alone."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from capsule_zoo import create, load
from capsule_zoo.inference import (
    classify,
    encode,
    evaluate,
    log_weights,
    posterior_predictive,
    reconstruct,
    sample,
)
from capsule_zoo.inference.posterior.refine import refine

IMAGES = torch.rand(3, 1, 28, 28, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def work():
    """Calls of every kind, on two trained entries and a classifier, by name."""
    parts, codes = load("part-whole-mnist"), load("shape-codes-mnist")
    classifier = create("cnn")
    calls = {
        "classify": lambda: classify(classifier.model, classifier.guide, IMAGES),
        "sample": lambda: sample(codes.model),
    }
    for name, entry in {"parts": parts, "codes": codes}.items():
        pair = entry.model, entry.guide.eval()
        calls |= {
            f"encode {name}": lambda p=pair: encode(*p, IMAGES),
            f"reconstruct {name}": lambda p=pair: reconstruct(*p, IMAGES),
            f"draw {name}": lambda p=pair: posterior_predictive(*p, IMAGES, 2),
            f"evaluate {name}": lambda p=pair: _log_weight(evaluate(*p, IMAGES, num_particles=2)),
        }
    pair = parts.model, parts.guide
    calls["refine"] = lambda: refine(*pair, IMAGES, steps=1, distribution="normal").refinement.end
    with torch.no_grad():
        loose = parts.make_guide("delta").eval()
        calls["log weights"] = lambda: log_weights(parts.model, loose, IMAGES)[0].isfinite()
    return calls


def _log_weight(idata) -> Tensor:
    return torch.as_tensor(idata["sample_stats"]["log_weight"].values)


def _flat(result) -> Tensor:
    values = result.values() if isinstance(result, dict) else [result]
    return torch.cat([torch.as_tensor(value).detach().double().flatten() for value in values])


@pytest.mark.long
def test_four_threads_get_what_one_thread_gets(work):
    alone = {name: _flat(call()) for name, call in work.items()}
    names = [name for _ in range(4) for name in work]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda name: _flat(work[name]()), names))
    different = {n for n, f in zip(names, results, strict=True) if not torch.equal(f, alone[n])}
    assert not different
