"""Faults on purpose: killed trainings, damaged and odd inputs, and folders that take no file.

A training run is killed at random moments (SIGKILL, which no program can catch), resumed, killed
again, and so on until it ends; it has to end bit for bit where an undisturbed run ends. Odd inputs
have to give a finite result or one of the errors that a user can fix; any other error counts as
unclear. A checkpoint that cannot be written has to leave the earlier one intact.
"""

import json
import math
import os
import random
import resource
import shutil
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from io import BytesIO, StringIO
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from capsule_zoo.cli import main
from capsule_zoo.data import load_dataset
from capsule_zoo.inference import CheckpointError, Checks, NonFiniteLoss, evaluate, fit
from capsule_zoo.inference.training.checkpoint import load_checkpoint, save_checkpoint
from capsule_zoo.inference.training.progress import COLUMNS
from capsule_zoo.registry import create, load, save_entry, small_settings

ENTRY = "vae"
STEPS, EVERY = 300, 7  # updates of a training run that is killed, and updates between checkpoints
NOBODY = 65534  # a user whom folders do not belong to
REFUSED = 2  # exit status of a command that was used wrongly
CLEAR = (ValueError, OSError, NonFiniteLoss)  # the command line shows these without a traceback


@dataclass
class Counts:
    """Trials: tried, ended in an error that a user can fix, and a line for each that went wrong."""

    tried: int = 0
    refused: int = 0
    bad: list[str] = field(default_factory=list)


def small_training(path: Path, seed: int, steps: int = STEPS) -> None:
    """Train a small pair, from its checkpoint if there is one, and write the last checkpoint."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    entry = create(ENTRY, **small_settings(ENTRY))
    images = torch.rand(64, *entry.model.image_shape, generator=torch.Generator().manual_seed(1))
    fit(
        entry.model,
        entry.guide,
        images,
        steps=steps,
        batch_size=8,
        checks=Checks(
            every=EVERY, checkpoint=path, resume=path if path.is_file() else None, progress=False
        ),
        seed=seed,
    )


def killed_trainings(kills: int, seed: int, folder: Path, steps: int = STEPS) -> Counts:
    """Kill training runs at random moments until `kills` were killed, and compare their ends.

    Args:
        kills: number of kills; a run takes about ten of them.
        seed: seed of the moments, and of the first run.
        folder: where checkpoints are written.
        steps: updates of each run.

    Returns:
        The number of kills, and the runs that ended elsewhere or could not be resumed.
    """
    moments, counts = random.Random(seed), Counts()
    context = get_context("forkserver")  # quick starts, and no threads of this process in a fork
    context.set_forkserver_preload([__name__])
    run = seed
    while counts.tried < kills:
        whole, broken = folder / f"whole-{run}.safetensors", folder / f"killed-{run}.safetensors"
        began = time.monotonic()
        _finished(context.Process(target=small_training, args=(whole, run, steps)))
        length = time.monotonic() - began
        while True:
            process = context.Process(target=small_training, args=(broken, run, steps))
            process.start()
            process.join(moments.uniform(0, 0.5) * length)
            if process.exitcode is None:
                process.kill()
                process.join()
            if process.exitcode == -signal.SIGKILL:
                counts.tried += 1
                if counts.tried < kills:
                    continue
                _finished(context.Process(target=small_training, args=(broken, run, steps)))
            elif process.exitcode:
                counts.bad.append(f"run {run} could not be resumed after kill {counts.tried}")
                break
            if difference := first_difference(load_checkpoint(whole), load_checkpoint(broken)):
                counts.bad.append(f"run {run} ended elsewhere: {difference}")
            break
        run += 1
    return counts


def _finished(process: Any) -> None:
    process.start()
    process.join()


def first_difference(one: Any, other: Any, path: str = "") -> str | None:
    """Return the path of the first value in which two checkpoints differ, times left out."""
    if path.endswith("/seconds"):
        return None
    if path.endswith("/history"):
        timeless = [i for i, name in enumerate(COLUMNS) if name != "seconds"]
        one, other = one[:, timeless], other[:, timeless]
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        differences = (first_difference(one[key], other[key], f"{path}/{key}") for key in one)
        return next(filter(None, differences), None)
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        rows = zip(range(len(one)), one, other, strict=True)
        return next(filter(None, (first_difference(a, b, f"{path}/{i}") for i, a, b in rows)), None)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return None if torch.equal(one.nan_to_num(), other.nan_to_num()) else path
    return None if one == other or (one != one and other != other) else path


def odd_inputs(number: int, seed: int, folder: Path) -> dict[str, Counts]:
    """Give damaged files, odd images and odd words to the zoo, and count unclear answers.

    Args:
        number: inputs in all; each of the four kinds gets a quarter.
        seed: seed of the inputs.
        folder: where files are written.

    Returns:
        By kind: `load`, `folder` (pictures), `evaluate` and `command` (the command line).
    """
    entry = create(ENTRY, **small_settings(ENTRY))
    save_entry(entry, folder / "run", data="digits", seed=0)
    kinds: dict[str, Callable[[random.Random], object]] = {
        "load": lambda chance: damaged_run(chance, folder),
        "folder": lambda chance: damaged_pictures(chance, folder),
        "evaluate": lambda chance: odd_images(chance, entry),
        "command": lambda chance: odd_command(chance, folder),
    }
    results: dict[str, Counts] = {}
    for kind, give in kinds.items():
        chance, counts = random.Random(f"{seed} {kind}"), Counts()
        for trial in range(number // len(kinds)):
            counts.tried += 1
            try:
                counts.refused += give(chance) == REFUSED
            except CLEAR as error:
                counts.refused += 1
                if not str(error).strip():
                    counts.bad.append(f"{kind} {trial}: an empty {type(error).__name__}")
            except Exception as error:  # what nobody foresaw is what is looked for
                counts.bad.append(f"{kind} {trial}: {type(error).__name__}: {error}"[:200])
        results[kind] = counts
    return results


def damage(content: bytes, chance: random.Random) -> bytes:
    """Return content cut off, with some bytes changed, or with some bytes added."""
    data = bytearray(content)
    fault = chance.randrange(4)
    if fault == 0:
        return bytes(data[: chance.randrange(len(data) + 1)])
    if fault == 1:
        return bytes(data) + chance.randbytes(chance.randrange(1, 64))
    reach = len(data) if fault == 2 else min(len(data), 400)  # a header decides on the rest
    for _ in range(chance.randrange(1, 4)):
        data[chance.randrange(reach)] = chance.randrange(256)
    return bytes(data)


def exchange(tree: Any, chance: random.Random) -> None:
    """Exchange, drop or rename one value somewhere in a tree of dicts and lists, in place."""
    keys: list[Any] = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
    key = chance.choice(keys)
    if isinstance(tree[key], (dict, list)) and tree[key] and chance.random() < 0.7:
        return exchange(tree[key], chance)
    action = chance.randrange(4)
    if action == 0:
        del tree[key]
    elif action == 1 and isinstance(tree, dict):
        tree["x" + key] = tree.pop(key)
    else:
        tree[key] = chance.choice([-1, 0, 3, 1.5, "x", "", None, True, [], {}, [1, 2], {"a": 1}])


def damaged_run(chance: random.Random, folder: Path) -> None:
    """Load a run folder of which one file is damaged, and look at what comes out."""
    copy = folder / "damaged"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder / "run", copy)
    file = copy / chance.choice(["config.json", "model.safetensors", "guide.safetensors"])
    if file.suffix == ".json" and chance.random() < 0.8:
        recipe = json.loads(file.read_text())
        exchange(recipe, chance)
        file.write_text(json.dumps(recipe))
    else:
        file.write_bytes(damage(file.read_bytes(), chance))
    entry = load(copy)
    for module in (entry.model, entry.guide):
        for name, value in module.state_dict().items():
            if not value.isfinite().all():
                raise ArithmeticError(f"{name} was loaded with numbers that are not finite")


MODES = ("L", "RGB", "RGBA", "1", "P", "I;16", "F", "CMYK", "LA")


def damaged_pictures(chance: random.Random, folder: Path) -> None:
    """Read a folder of pictures, some of which are damaged, of other modes, or no pictures."""
    place = folder / "pictures"
    shutil.rmtree(place, ignore_errors=True)
    for number in range(chance.randrange(8)):
        kind = place / chance.choice("ab") if chance.random() < 0.5 else place
        kind.mkdir(parents=True, exist_ok=True)
        mode = chance.choice(["L", "L", "RGB"] if chance.random() < 0.8 else MODES)
        suffix = {"F": "tiff", "CMYK": "jpg"}.get(mode, "png")
        pixels = chance.choice([(8, 8), (8, 8), (1, 1), (5, 9), (300, 2)])
        written = BytesIO()
        Image.new(mode, pixels, 0).save(written, {"jpg": "jpeg"}.get(suffix, suffix))
        content = written.getvalue()
        if chance.random() < 0.15:
            content = damage(content, chance)
        suffix = suffix if chance.random() < 0.95 else chance.choice(["txt", "gif", "jpg"])
        (kind / f"{number}.{suffix}").write_bytes(content)
    size: Any = chance.choice([8, (8, 8), "8x8", None])
    if chance.random() < 0.1:
        size = chance.choice([0, -3, "8x", "big", (8, 8, 8), 1.5, "é"])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*(beside folders of classes|contrast|dark ink)")
        data = load_dataset(f"folder:{place}", size=size)
    for split in (data.train, data.validation, data.test):
        if not split.images.isfinite().all():
            raise ArithmeticError(f"{split.name} has pixels that are not finite")


def odd_images(chance: random.Random, entry: Any) -> None:
    """Evaluate a pair on images of odd shapes, types and values, with odd settings."""
    channels, height, width = entry.model.image_shape
    shape: tuple[int, ...] = (chance.randrange(4), channels, height, width)
    if chance.random() < 0.4:
        shape = tuple(chance.randrange(4) for _ in range(chance.randrange(6)))
    images: Any = torch.rand(shape, generator=torch.Generator().manual_seed(chance.randrange(99)))
    if chance.random() < 0.3:
        values = [math.nan, math.inf, -math.inf, -1.0, 2.0, 255.0, 1e30, 1e-40]
        images = images.masked_fill(torch.rand(shape) < 0.2, chance.choice(values))
    kind = chance.randrange(8)
    if kind == 0:
        images = (
            images.nan_to_num()
            .clamp(-9, 9)
            .to(chance.choice([torch.int64, torch.bool, torch.uint8]))
        )
    elif kind == 1:
        images = images.to(chance.choice([torch.float64, torch.float16, torch.complex64]))
    elif kind == 2:
        images = chance.choice([images.numpy(), images.tolist(), None, "images", 3, np.zeros(2)])
    numbers = [0, -1, 1, 2, 3, 1.5, True, "3", None, 10**6]
    settings: dict[str, Any] = {
        name: chance.choice(numbers[:-1] if name != "batch_size" else numbers)
        for name in ("num_particles", "chains", "seed", "draws", "batch_size")
        if chance.random() < 0.07
    }
    settings = {"num_particles": 2, **settings}
    weights = evaluate(entry.model, entry.guide, images, **settings)
    if not np.isfinite(weights.sample_stats.log_weight).all():
        raise ArithmeticError("log weights that are not finite")


ODD_ARGUMENTS = (
    *("-1", "0", "1.5", "nan", "inf", "1e400", "", " "),
    *("None", "digits", "mnst", "vae", "../x", "\0", "é"),
)
COMMANDS: dict[str, list[str]] = {
    "show": ["vae"],
    "list": [],
    "evaluate": ["RUN", "--images", "4", "--particles", "2"],
    "compare": ["RUN", "--images", "4", "--particles", "2"],
    "figure": ["samples", "RUN"],
    "train": ["vae", "--steps", "1", "--out", "OUT", "--data", "digits"],
    "reproduce": ["vae/guidez"],
    "segment": ["RUN"],
}


def odd_command(chance: random.Random, folder: Path) -> int:
    """Call a command with words missing, exchanged, repeated or made up; return its status.

    Raises:
        ArithmeticError: the command printed a number that is not finite.
        RuntimeError: the exit status is not 0, 1 or 2, or nothing was said about an error.
    """
    name = chance.choice(list(COMMANDS))
    arguments = [name, *COMMANDS[name]]
    for _ in range(chance.choice([0, 1, 1, 1, 2, 3])):
        place, action = chance.randrange(1, len(arguments) + 1), chance.choice([0, 1, 2, 2, 2, 3])
        if action == 0:
            arguments.insert(place, chance.choice(ODD_ARGUMENTS))
        elif action == 1:
            arguments.insert(
                place, "--" + chance.choice(["seed", "data", "images", "json", "guides", "x"])
            )
        elif place < len(arguments):
            arguments[place : place + 1] = [chance.choice(ODD_ARGUMENTS)] if action == 2 else []
    if arguments[0] == "train" and "--steps" not in arguments and "--minutes" not in arguments:
        arguments += ["--steps", "1"]
    places = {
        "RUN": str(folder / "run"),
        "OUT": str(folder / "out"),
        "OUT.png": str(folder / "out.png"),
    }
    out, errors = StringIO(), StringIO()
    here = Path.cwd()
    os.chdir(folder)
    try:
        with redirect_stdout(out), redirect_stderr(errors):
            main([places.get(word, word) for word in arguments])
        status: Any = 0
    except SystemExit as ended:
        status = ended.code
    finally:
        os.chdir(here)
    if status not in (0, 1, 2, None):
        raise RuntimeError(f"{' '.join(arguments)}: status {status}")
    if status in (1, 2) and not (errors.getvalue() + out.getvalue()).strip():
        raise RuntimeError(f"{' '.join(arguments)}: status {status}, and no word")
    if status in (0, None) and any(w in out.getvalue().split() for w in ("nan", "inf", "-inf")):
        raise ArithmeticError(f"{' '.join(arguments)}: printed a number that is not finite")
    return status or 0


def full_disk(folder: Path) -> Counts:
    """Write a checkpoint over an earlier one, where there is no room or no file can be written.

    Each trial runs in a process of its own. The lack of room is a limit on the size of files. The
    folder that is read only is read by another user if this process may be any user.
    """
    counts = Counts()
    place = folder / "kept"
    place.mkdir()
    path = place / "kept.safetensors"
    save_checkpoint(path, {"model": torch.ones(4)})
    for trial in (no_room, no_folder, read_only):
        counts.tried += 1
        process = get_context("forkserver").Process(target=trial, args=(path,))
        _finished(process)
        weights = load_checkpoint(path)["model"]
        if process.exitcode or not torch.equal(weights, torch.ones(4)):
            counts.bad.append(
                f"{trial.__name__}: status {process.exitcode}, kept {weights.tolist()}"
            )
    return counts


def no_room(path: Path) -> None:
    """Overwrite a checkpoint with one that is larger than a file may be; exit with 1 if it can."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    _refused(path)


def no_folder(path: Path) -> None:
    """Write a checkpoint below a file; exit with 1 if it can."""
    _refused(path / "below.safetensors")


def read_only(path: Path) -> None:
    """Overwrite a checkpoint in a folder that takes no file; exit with 1 if it can."""
    place = path.parent
    place.parent.chmod(0o755)  # a temporary folder is its owner's alone
    place.chmod(0o555)
    if os.geteuid() == 0:  # who may write everywhere
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    _refused(path)


def _refused(path: Path) -> None:
    try:
        save_checkpoint(path, {"model": torch.zeros(10_000)})
    except CheckpointError:
        return
    raise SystemExit(1)
