"""Break the code on purpose, one place at a time, and tell which test notices.

Each break changes one line that decides a published number: a split, a seed, a sign, a mean that
should be a sum, the base of a logarithm, the binarization, the order of classes. The tests run in a
copy of the repository. Only the file that should notice is run, for a number must be guarded where
a reader of its tests would look.

    python tests/breaks.py                          # all breaks, and the table in tests/README.md
    python tests/breaks.py "IWAE without log K"     # one of them; nothing is written

A break that its file does not notice is a test that is missing.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "tests/README.md"
BEGIN, END = "<!-- breaks -->", "<!-- end -->"
LEFT_OUT = (".git", ".venv", "build", "*.egg-info", "__pycache__", ".*_cache", "*.png")


@dataclass(frozen=True)
class Break:
    """One line that is changed.

    Attributes:
        name: what is wrong then, in a few words.
        file, old, new: the file, a text that it holds once, and what replaces the text.
        watch: the file below `tests` that should notice.
    """

    name: str
    file: str
    old: str
    new: str
    watch: str


BREAKS = (
    Break(
        "test images are training images",
        "data/sources.py",
        "test = read(folder, train=False, download=download)",
        "test = read(folder, train=True, download=download)",
        "data/test_datasets.py",
    ),
    Break(
        "validation images are also trained on",
        "data/datasets.py",
        "return split[order[: number - whole]], split[order[number - whole :]]",
        "return split[order], split[order[number - whole :]]",
        "data/test_datasets.py",
    ),
    Break(
        "the probe is fitted on test images",
        "experiments/common/energy.py",
        "training_set = data.train[:PROBED].binarize()",
        "training_set = data.test[:PROBED].binarize()",
        "capsule_zoo/test_energy_experiments.py",
    ),
    Break(
        "the seed does not reach the split",
        "data/datasets.py",
        "order = torch.randperm(number, generator=seeded_generator(seed))",
        "order = torch.randperm(number, generator=seeded_generator(0))",
        "data/test_datasets.py",
    ),
    Break(
        "all chains of an evaluation have one seed",
        "inference/evaluation/evaluate.py",
        "with use_seed(chain_seed(seed, number)):",
        "with use_seed(chain_seed(seed, 0)):",
        "inference/test_evaluate.py",
    ),
    Break(
        "binarization is a threshold",
        "data/transforms.py",
        "binary = (uniform.to(images.device) < images).to(images.dtype)",
        "binary = (0.5 < images).to(images.dtype)",
        "data/test_pixels.py",
    ),
    Break(
        "the guide's density is added",
        "inference/log_weight.py",
        "log_density(scored, images) - log_density(guide_trace, images)",
        "log_density(scored, images) + log_density(guide_trace, images)",
        "inference/test_evaluate.py",
    ),
    Break(
        "the mean over sites' coordinates, not the sum",
        "models/common/trace_density.py",
        "return term.sum(others) if others else term",
        "return term.mean(others) if others else term",
        "inference/test_evaluate.py",
    ),
    Break(
        "IWAE without log K",
        "inference/evaluation/summary.py",
        "return log_sum(log_weight) - np.log(len(log_weight))",
        "return log_sum(log_weight)",
        "inference/test_summary.py",
    ),
    Break(
        "IWAE with a logarithm of base 2",
        "inference/evaluation/summary.py",
        "return log_sum(log_weight) - np.log(len(log_weight))",
        "return log_sum(log_weight) - np.log2(len(log_weight))",
        "inference/test_summary.py",
    ),
    Break(
        "the effective draws are those of the best image",
        "inference/evaluation/summary.py",
        '"ess": float(ess.mean()),',
        '"ess": float(ess.max()),',
        "inference/test_summary.py",
    ),
    Break(
        "standard deviation instead of standard error",
        "experiments/common/findings.py",
        "error = (apart.std() / count**0.5).item() if count > 1 else None",
        "error = apart.std().item() if count > 1 else None",
        "capsule_zoo/test_experiments.py",
    ),
    Break(
        "the standard error of a fraction forgets the square root",
        "inference/evaluation/classification.py",
        "return cls(value, (assumed * (1 - assumed) / count) ** 0.5, count)",
        "return cls(value, assumed * (1 - assumed) / count, count)",
        "inference/test_classification.py",
    ),
    Break(
        "error rate and accuracy exchanged",
        "inference/evaluation/classification.py",
        "program.predict(x) != y",
        "program.predict(x) == y",
        "inference/test_classification.py",
    ),
    Break(
        "predictions in training mode",
        "inference/evaluation/classification.py",
        """isolated_parameters(model, guide), eval_mode(model, guide), torch""",
        """isolated_parameters(model, guide.train()), torch""",
        "inference/test_evaluation_mode.py",
    ),
    Break(
        "classes of clusters in another order",
        "inference/probes.py",
        "return classes[assignment]",
        "return classes[np.argsort(assignment)]",
        "inference/test_clustering.py",
    ),
    Break(
        "kinds named after the rarest class",
        "experiments/shape_codes/objects.py",
        "commonest = count.argmax(1)",
        "commonest = count.argmin(1)",
        "capsule_zoo/test_shape_codes_entry.py",
    ),
    Break(
        "kinds named by test images",
        "experiments/shape_codes/objects.py",
        "count = count_classes(belief, train_labels)",
        "count = count_classes(tested, truth)",
        "capsule_zoo/test_shape_codes_entry.py",
    ),
    Break(
        "the fraction lost of the whole, not of what parts explain",
        "experiments/shape_codes/objects.py",
        'return {"fraction_lost": ratio(inferred - redrawn, inferred - background)}',
        'return {"fraction_lost": ratio(inferred - redrawn, inferred)}',
        "capsule_zoo/test_shape_codes_entry.py",
    ),
    Break(
        "Frechet distance with half of the overlap",
        "inference/sample_quality.py",
        "- 2 * np.sqrt(overlap).sum()",
        "- np.sqrt(overlap).sum()",
        "inference/test_sample_quality.py",
    ),
    Break(
        "exact samples with the switches in reverse order",
        "inference/energy/enumeration.py",
        "_digits(drawn, 2, model.num_capsules).flip(1)",
        "_digits(drawn, 2, model.num_capsules)",
        "inference/test_log_partition.py",
    ),
    Break(
        "log Z counts all chains",
        "inference/energy/log_partition.py",
        "log_weight.logsumexp(0) - math.log(chains)",
        "log_weight.logsumexp(0)",
        "inference/test_log_partition.py",
    ),
    Break(
        "log Z subtracted with the wrong sign",
        "capsule_zoo/runs/measurements.py",
        "LogLikelihood(-free_energy.mean().item() - log_z.value, error, log_z)",
        "LogLikelihood(-free_energy.mean().item() + log_z.value, error, log_z)",
        "capsule_zoo/test_energy_experiments.py",
    ),
    Break(
        "annealed chains start at the worst guide",
        "inference/annealing/bounds.py",
        "return max(means, key=",
        "return min(means, key=",
        "inference/test_exceedance.py",
    ),
    Break(
        "one lucky draw decides whether a guide exceeds the chains",
        "inference/annealing/exceedance.py",
        "return log_mean(others), log_mean_error(log_weight)",
        "return log_mean(log_weight), log_mean_error(log_weight)",
        "inference/test_exceedance.py",
    ),
    Break(
        "annealing forgets its last temperature",
        "inference/annealing/transitions.py",
        "return log_weight + last * terms.gain.double(), accepted",
        "return log_weight, accepted",
        "inference/test_annealed.py",
    ),
    Break(
        "requests inside and outside exchanged",
        "experiments/generative_capsnet/beyond_training.py",
        '(("inside", inside), ("outside", ~inside))',
        '(("inside", ~inside), ("outside", inside))',
        "capsule_zoo/test_generative_capsnet_experiments.py",
    ),
    Break(
        "pixels in [0, 1], where the article has [-1, 1]",
        "experiments/generative_capsnet/beyond_training.py",
        "errors.append(4 * error.square().mean().item())",
        "errors.append(error.square().mean().item())",
        "capsule_zoo/test_generative_capsnet_experiments.py",
    ),
    Break(
        "angles 359 degrees apart are far from each other",
        "experiments/generative_capsnet/bounds.py",
        "error = ((inferred - angles + 180) % 360 - 180).abs()",
        "error = (inferred - angles).abs()",
        "capsule_zoo/test_generative_capsnet_experiments.py",
    ),
    Break(
        "the mixture of a pixel takes its largest layer",
        "models/parts/pixel_mixture.py",
        "density = (log_density + fraction.log()).logsumexp(0)",
        "density = (log_density + fraction.log()).amax(0)",
        "models/test_pixel_mixture.py",
    ),
    Break(
        "one of two overlapping digits is enough",
        "experiments/capsule_network/overlaps.py",
        "(highest != classes).any(1)",
        "(highest != classes).all(1)",
        "capsule_zoo/test_network_experiments.py",
    ),
    Break(
        "class error of recurrent capsules on training images",
        "experiments/recurrent_capsules/strokes.py",
        '"class_error": class_error(entry, data.test),\n        "class_error_gray"',
        '"class_error": class_error(entry, data.train),\n        "class_error_gray"',
        "capsule_zoo/test_every_experiment.py",
    ),
    Break(
        "a scene is right from nine of ten of its points",
        "experiments/constellations/parsing.py",
        '"scenes": mean_and_error((accuracy > RIGHT).float()),',
        '"scenes": mean_and_error((accuracy > 0.9).float()),',
        "capsule_zoo/test_constellations.py",
    ),
    Break(
        "the probe of rotated digits is fitted on test digits",
        "experiments/shape_codes/objects.py",
        "fit_probe(features[0][:PROBED], sets.train.labels[:PROBED], PENALTY)",
        "fit_probe(features[1][:PROBED], sets.test.labels[:PROBED], PENALTY)",
        "capsule_zoo/test_every_experiment.py",
    ),
    Break(
        "the last turn always wins",
        "experiments/shape_codes/objects.py",
        "better = score(reading) > score(best)",
        "better = score(reading) < float('inf')",
        "capsule_zoo/test_shape_codes_entry.py",
    ),
    Break(
        "clusters are fitted to training and test features",
        "inference/probes.py",
        """seed).fit(train)
    names = name_clusters(clusters.labels_,""",
        """seed).fit(np.concatenate([train, test]))
    names = name_clusters(clusters.labels_[: len(train)],""",
        "inference/test_clustering.py",
    ),
    Break(
        "the best of the seeds is called the worst",
        "experiments/common/findings.py",
        "min(tuple(outcome[name]) for outcome in outcomes)",
        "max(tuple(outcome[name]) for outcome in outcomes)",
        "capsule_zoo/test_experiments.py",
    ),
    Break(
        "distances of calibration cancel between bins",
        "experiments/common/findings.py",
        "return (apart.abs().sum() / len(right)).item()",
        "return (apart.sum().abs() / len(right)).item()",
        "capsule_zoo/test_experiments.py",
    ),
    Break(
        "the best measurement of a run on test scenes, not the last",
        "experiments/scenes/counts.py",
        "return next((number for passed, _, number in reversed(curve) if passed <= seconds), None)",
        "return max((number for passed, _, number in curve if passed <= seconds), default=None)",
        "capsule_zoo/test_scenes_experiments.py",
    ),
    Break(
        "scenes are learned from test scenes",
        "experiments/scenes/counts.py",
        "train(entry, data, options, options.minutes or length, checks=checks)",
        "train(entry, data.test, options, options.minutes or length, checks=checks)",
        "capsule_zoo/test_scenes_experiments.py",
    ),
    Break(
        "calibration is of the least likely count",
        "experiments/scenes/counts.py",
        "highest, numbers = chances.amax(1)",
        "highest, numbers = chances.amin(1)",
        "capsule_zoo/test_scenes_experiments.py",
    ),
    Break(
        "the ARI of the record leaves the ground out of the answers",
        "experiments/scenes/segmentation.py",
        "ari = foreground_ari(objects.numbers, test.objects)",
        "ari = foreground_ari(objects.owners, test.objects)",
        "capsule_zoo/test_scenes_experiments.py",
    ),
    Break(
        "settings are tried on test images",
        "experiments/zoo/equal_network.py",
        'return {"validation_error": error_rate(entry.model, entry.guide, data.validation)}',
        'return {"validation_error": error_rate(entry.model, entry.guide, data.test)}',
        "capsule_zoo/test_every_experiment.py",
    ),
    Break(
        "presences that are visited twice count twice",
        "guides/scenes/proposals.py",
        "SubsetDistribution(weight.masked_fill(again, -math.inf), rows, self.model.inner)",
        "SubsetDistribution(weight, rows, self.model.inner)",
        "models/test_scenes.py",
    ),
    Break(
        "the information of a Bernoulli logit is p",
        "inference/posterior/gauss_newton.py",
        "(distribution.logits, (distribution.probs * (1 - distribution.probs)).sqrt())",
        "(distribution.logits, distribution.probs.sqrt())",
        "inference/test_gauss_newton.py",
    ),
    Break(
        "the shown objects are those of the best draw of any number",
        "inference/objects.py",
        "best = torch.where(fits, weight, -torch.inf)",
        "best = torch.where(fits | True, weight, -torch.inf)",
        "inference/test_objects.py",
    ),
    Break(
        "the evidence of a scene is a sum over draws",
        "inference/objects.py",
        "*pixels, evidence - draws_less",
        "*pixels, evidence",
        "inference/test_objects.py",
    ),
    Break(
        "the foreground ARI is over all pixels",
        "inference/objects.py",
        "(true > 0) | too_few[:, None]",
        "(true >= 0) | too_few[:, None]",
        "inference/test_objects.py",
    ),
    Break(
        "the switch of a capsule says nothing about its parent",
        "models/units/one_parent.py",
        "log_weight = self.choice_and_switch(switch).log_softmax(0)",
        "log_weight = self.log_choice",
        "models/test_capsule_helmholtz.py",
    ),
    Break(
        "types take the poses of other objects",
        "models/parts/parent_selection.py",
        "pose = parents.pose.repeat_interleave(self.types, -2)",
        "pose = torch.cat([parents.pose] * self.types, -2)",
        "models/test_part_whole.py",
    ),
    Break(
        "a published number is reached within one standard error",
        "capsule_zoo/pages/published.py",
        "if abs(gain) <= 2 * error:",
        "if abs(gain) <= error:",
        "capsule_zoo/test_published.py",
    ),
    Break(
        "a number without an error reaches a published one",
        "capsule_zoo/pages/published.py",
        """if self.ours["se"] is None:
            return""",
        """if self.ours["value"] is None:
            return""",
        "capsule_zoo/test_published.py",
    ),
)


def main(names: list[str]) -> None:
    """Try the breaks of these names, or all; write the table if all were tried."""
    if unknown := set(names) - {mutation.name for mutation in BREAKS}:
        sys.exit(f"no break is called {sorted(unknown)}; the names are in {__file__}")
    rows = []
    for mutation in BREAKS:
        if not names or mutation.name in names:
            caught = first_failure(mutation)
            rows.append(f"| {mutation.name} | `{mutation.file}` | {caught or '**nothing**'} |")
            print(rows[-1], flush=True)
    if not names:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        table = ["| what is broken | where | what fails first |", "| --- | --- | --- |", *rows]
        PAGE.write_text("\n".join([before + BEGIN, *table, END + after]))


def first_failure(broken: Break) -> str | None:
    """Return the first test that fails in a copy of the repository with this break, or None."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
        changed = copy / broken.file
        changed.write_text(replaced(broken))
        return fails(copy, f"tests/{broken.watch}")


def replaced(broken: Break) -> str:
    """Return the file with the break in it."""
    text = (ROOT / broken.file).read_text()
    if text.count(broken.old) != 1:
        raise ValueError(f"{broken.file} must hold {broken.old!r} once; bring the break up to date")
    return text.replace(broken.old, broken.new)


def fails(copy: Path, tests: str) -> str | None:
    """Run a file of tests in a copy until one fails, and return its name in Markdown, or None."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
        tests,
    ]
    done = subprocess.run(
        command, cwd=copy, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": "."}
    )
    if done.returncode == 0:
        return None
    failed = re.search(
        r"^(?:FAILED|ERROR) tests/(\S+?)(?:::(\w+))?(?:\[.*)?(?: - .*)?$", done.stdout, re.M
    )
    if done.returncode != 1 or failed is None:
        raise RuntimeError(f"the tests did not run:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return f"`{failed[1]}`: {(failed[2] or 'import').removeprefix('test_').replace('_', ' ')}"


if __name__ == "__main__":
    main(sys.argv[1:])
