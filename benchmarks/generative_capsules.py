"""Measure the accuracy of Nazabal, Tsagkas & Williams' (2021) program on its own scenes.

    git clone https://github.com/anazabal/GenerativeCapsules
    python benchmarks/generative_capsules.py GenerativeCapsules --out results

It writes the record `constellations/their-program`: the first scenes of each noise, empty ones left
out, parsed by the program's RANSAC, its mixture and its permutations, and by the autoencoder of
Kosiorek et al. (2019), whose parses are stored there. The measures are `eval_segmentation` of the
program. Names end in the noise:

    papers_*    absent corners count as right
    strict_*    an absent corner is right only if its object is inferred to be absent

Both variational models have lambda 50, as the first of the program's own list, and at most five
restarts, which end where the truth is found, as in its `main.py`. Its loops over points are
replaced by equivalent array operations: `--as-it-is` leaves the loops, and takes hours.
Permutations parse fewer scenes, because they are slow. No time is measured, and `run_all` leaves
this file out, because it needs that program.
"""

import argparse
import contextlib
import io
import pickle
import shlex
import sys
import time
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from capsule_zoo.records import Number, Table, flatten, write_record

NOISES = {"00": 0.0, "01": 0.1, "025": 0.25}  # by their names in the files
EDGES = np.array([0, 4, 7, 11])  # corners of a square, a triangle and a square
LAMBDA, RESTARTS, UPDATES = 50, 5, 500
MODELS = {"mixture": "basic_model", "permutations": "sinkhorn_model_annealing_stop"}


class Arrays(pickle.Unpickler):
    """An unpickler that reads arrays of numbers and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if not module.startswith("numpy") or name not in {
            "scalar",
            "_reconstruct",
            "dtype",
            "ndarray",
        }:
            raise ValueError(f"a file of scenes holds {module}.{name}; it may hold arrays alone")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def program(folder: Path) -> dict[str, ModuleType]:
    """Import the program; in place of `monty` it gets a dictionary with attributes."""
    monty: Any = ModuleType("monty.collections")
    monty.AttrDict = type("AttrDict", (dict,), {"__getattr__": dict.__getitem__})
    sys.modules |= {"monty": ModuleType("monty"), "monty.collections": monty}
    sys.path.insert(0, str(folder))
    names = ("data_creator", "ransac_model", "metrics", "utils", *MODELS.values())
    return {name: import_module(name) for name in names}


def replace_loops(models: list[Any]) -> None:
    """Replace the program's loops over points and corners by equivalent array operations."""

    def precision(params: Any, hyper: Any, data: Any) -> list[np.ndarray]:
        weight = params["r_mnk"][-1].sum(0)
        parts = zip(np.split(weight, EDGES[1:-1]), data["FF"], strict=True)
        return [hyper["Lambda_0"] + hyper["lambda_0"] * np.tensordot(w, f, 1) for w, f in parts]

    def mean(params: Any, hyper: Any, data: Any, covariance: Any) -> list[np.ndarray]:
        base, means = hyper["Lambda_0"] @ hyper["mu_0"], []
        for k, weight in enumerate(np.split(params["r_mnk"][-1], EDGES[1:-1], axis=1)):
            pull = weight.reshape(1, -1) @ np.asarray(data["F_xm"][k]).reshape(-1, 4)
            means.append(covariance[k] @ (base + hyper["lambda_0"] * pull[0]))
        return means

    def distance(params: Any, data: Any) -> np.ndarray:
        places = [data["F"][k] @ params["mu_k"][-1][k] for k in range(3)]
        return ((data["X_m"][:, None] - np.concatenate(places)) ** 2).sum(2)

    def spread(covariance: Any, data: Any) -> list[float]:
        return [
            float(x)
            for k in range(3)
            for x in np.asarray(data["FF"][k]).reshape(-1, 16) @ covariance[k].T.reshape(16)
        ]

    for model in models:
        verb = "compute" if hasattr(model, "compute_Lambda_k") else "update"
        setattr(model, f"{verb}_Lambda_k", precision)
        setattr(model, f"{verb}_mu_k", mean)
        model.compute_mahal_term, model.compute_trace_term = distance, spread


def ransac(parts: dict[str, Any], data: Any) -> np.ndarray:
    """Parse scenes with the program's RANSAC and return the label of every point."""
    labels = np.zeros(data["M"], int)
    with contextlib.redirect_stdout(io.StringIO()):
        _, detections, _ = parts["ransac_model"].run(data)
    for number, members in enumerate(detections):
        labels[list(members)] = min(number + 1, 3)
    return labels


def variational(parts: dict[str, Any], model: Any, data: Any, starts: list[Any]) -> np.ndarray:
    """Return the responsibilities (points, corners) of the restart with the best bound."""
    best, best_params = -np.inf, None
    for start in starts:
        hyper = model.hyperparams_initialization(data, lambda_0=LAMBDA)
        params, bounds = model.params_initialization(start, data, hyper), [-np.inf]
        for _ in range(UPDATES):
            params, terms, _ = model.params_update(data, params, hyper)
            bounds.append(np.sum(terms))
            if model.stop(bounds, bounds[-2], hyper, params, data, LAMBDA):
                break
        if bounds[-1] > best:
            best, best_params = bounds[-1], params
        if parts["utils"].is_correct(params, data):
            break
    assert best_params is not None
    return best_params["r_mnk"][-1]


def read(
    parts: dict[str, Any], stored: Any, number: int, names: tuple[str, ...]
) -> dict[str, tuple[Any, Any]]:
    """Return the inferred label and presence of every corner, by method."""
    true = stored["gt_presence"][:number]
    size = number, EDGES[-1]  # an absent corner has the first label, as in the program
    answers = {name: (np.ones(size), np.zeros(size)) for name in names}
    shapes = ["square", "triangle", "square"]
    for scene in range(number):
        data = parts["data_creator"].load_image(stored, shapes, scene)
        if not sum(data["visible_objects"]):
            continue
        visible = np.repeat(np.array(data["visible_objects"], bool), np.diff(EDGES))
        if "ransac" in names:
            answers["ransac"][0][scene, visible] = ransac(parts, data)
            answers["ransac"][1][scene] = true[scene]
        first = parts["basic_model"]
        starts = [first.r_mnk_initialization(data) for _ in range(RESTARTS)]
        for name in set(names) & MODELS.keys():
            fractions = variational(parts, parts[MODELS[name]], data, starts)
            match = fractions.argmax(1)
            answers[name][0][scene, visible] = 1 + np.searchsorted(EDGES[1:], match, side="right")
            answers[name][1][scene] = fractions.sum(0) > 1e-3
    return answers


def measures(parts: dict[str, Any], predictions: Any, stored: Any) -> dict[str, Number]:
    """Return one method's fractions of correct corners, by both measures."""
    labels, read_as_present = predictions
    number = len(labels)
    true = stored["gt_presence"][:number]
    answer = (1 + stored["pattern_id"][:number]) * true
    everywhere = np.ones((number, EDGES[-1]))
    numbers: dict[str, Number] = {}
    for name, present in (("papers", true), ("strict", read_as_present)):
        fractions = np.array(
            parts["metrics"].eval_segmentation(labels * present, answer, EDGES, everywhere)[1]
        )
        error = fractions.std(ddof=1) / len(fractions) ** 0.5
        numbers[name] = float(fractions.mean()), float(error) or None, len(fractions)
    return numbers


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="a checkout of anazabal/GenerativeCapsules")
    parser.add_argument("--scenes", type=int, default=512, help="of each noise")
    parser.add_argument("--few", type=int, default=48, help="of each noise, for permutations")
    parser.add_argument("--as-it-is", action="store_true", help="leave the program's loops")
    parser.add_argument("--out", type=Path, default=Path("runs/reproduced"))
    options = parser.parse_args(arguments)
    began, parts = time.perf_counter(), program(options.folder)
    if not options.as_it_is:
        replace_loops([parts[file] for file in MODELS.values()])
    tables = {}
    for name, noise in NOISES.items():
        np.random.seed(0)  # the program draws from numpy's own generator
        with (options.folder / f"valid_report_vals_{name}.pkl").open("rb") as file:
            stored = Arrays(file).load()
        here = np.repeat(stored["pred_presence"], np.diff(EDGES), axis=1)
        answers = {
            "autoencoder": (stored["capsule_id"][: options.scenes] + 1, here[: options.scenes]),
            **read(parts, stored, options.scenes, ("ransac", "mixture")),
            **read(parts, stored, options.few, ("permutations",)),
        }
        rows = {method: measures(parts, answer, stored) for method, answer in answers.items()}
        columns = {q: {m: numbers[q] for m, numbers in rows.items()} for q in ("papers", "strict")}
        suffix = f"{noise:g}".replace(".", "")
        tables[f"noise {noise:g}"] = Table(columns, "{quantity}_{variant}_" + suffix)
        print(f"noise {noise:g}: {rows}", flush=True)
    metrics, table_layout = flatten(tables)
    command_line = ["python", "benchmarks/generative_capsules.py", *(arguments or sys.argv[1:])]
    path = write_record(
        "constellations/their-program",
        metrics,
        command=shlex.join(command_line),
        seed=0,
        data="their stored scenes",
        seconds=time.perf_counter() - began,
        folder=options.out,
        tables=table_layout,
        summary="Measure the program of Nazabal et al. (2021) on the scenes that it stores.",
    )
    print(f"written to {path}")


if __name__ == "__main__":
    main()
