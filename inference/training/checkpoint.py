"""Checkpoints as safetensors files, written whole or not at all and never as a pickle.

A checkpoint is a tree of dicts, lists, numbers and tensors. The tensors are stored as safetensors.
The tree around them is stored as JSON in the header of the same file.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from capsule_zoo.data.files import write_whole

FORMAT = "capsule-zoo checkpoint 1"
_TENSOR = "__tensor__"


class CheckpointError(ValueError):
    """The error raised for a checkpoint that cannot be written or read, or does not fit."""


def save_checkpoint(path: str | os.PathLike, tree: dict) -> None:
    """Save a tree (nested dicts and lists of tensors, numbers, strings, None) to a file.

    Raises:
        CheckpointError: the file cannot be written; an existing file at `path` is intact.
    """
    tensors: dict[str, Tensor] = {}
    skeleton = _pack(tree, "", tensors)
    header = {"tree": json.dumps({"format": FORMAT, **skeleton})}  # several have no order
    try:
        write_whole(path, to_bytes(tensors, header))
    except OSError as error:
        raise CheckpointError(
            f"could not write the checkpoint {path}: {error}; any earlier checkpoint there is "
            "intact, make room or choose another path"
        ) from error


def load_checkpoint(path: str | os.PathLike) -> dict:
    """Load a tree saved by `save_checkpoint`, with its tensors on the CPU.

    Raises:
        CheckpointError: the file does not exist, is truncated or is not a zoo checkpoint.
    """
    if not Path(path).is_file():
        raise CheckpointError(f"there is no checkpoint {path}; check the path")
    try:
        with safe_open(str(path), "pt", device="cpu") as file:
            header = file.metadata() or {}
            tree = json.loads(header.get("tree", "{}"))
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
        if (version := header.get("format", tree.get("format"))) != FORMAT:  # earlier files: a key
            raise CheckpointError(
                f"{path} is no checkpoint of this version of the zoo: its format is "
                f"{version!r}, not {FORMAT!r}"
            )
        return _unpack(tree, tensors)
    except (SafetensorError, OSError, KeyError, json.JSONDecodeError) as error:
        raise CheckpointError(
            f"{path} cannot be read as a safetensors checkpoint ({error}); it is truncated or of "
            "another kind. Pickled files (torch.save) are never opened, for they can run code"
        ) from error


def check_same_modules(modules: dict[str, nn.Module], tree: dict) -> None:
    """Raise CheckpointError, with all differences, unless a checkpoint belongs to these modules."""
    for role, module in modules.items():
        shapes = {name: tuple(value.shape) for name, value in module.state_dict().items()}
        other = {name: tuple(value.shape) for name, value in tree[role].items()}
        held, kind = tree["classes"][role], type(module).__name__
        problems = [] if held == kind else [f"it holds a {held}, not a {kind}"]
        problems += [f"it lacks {name} {shapes[name]}" for name in shapes if name not in other]
        problems += [
            f"it has an extra {name} {other[name]}" for name in other if name not in shapes
        ]
        problems += [
            f"{name} has shape {other[name]}, not {shapes[name]}"
            for name in shapes
            if name in other and shapes[name] != other[name]
        ]
        if problems:
            listing = "\n".join(f"  - {problem}" for problem in problems)
            raise CheckpointError(f"the checkpoint is of another {role}:\n{listing}")


def _pack(node: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Return the JSON skeleton of `node`, and put its tensors into `tensors` by path."""
    if isinstance(node, Tensor):
        tensors[path] = node.detach().to("cpu", copy=True).contiguous()
        return {_TENSOR: path}
    if isinstance(node, dict):
        return {
            "keys": [[type(key).__name__, str(key)] for key in node],
            "values": [_pack(value, f"{path}/{key}", tensors) for key, value in node.items()],
        }
    if isinstance(node, (list, tuple)):
        return [_pack(value, f"{path}/{index}", tensors) for index, value in enumerate(node)]
    if node is None or isinstance(node, (bool, int, float, str)):
        return node
    raise CheckpointError(f"cannot store {path}: {type(node).__name__} is no tensor or number")


def _unpack(node: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(node, dict):
        if _TENSOR in node:
            return tensors[node[_TENSOR]]
        keys = [int(key) if kind == "int" else key for kind, key in node["keys"]]
        return {key: _unpack(v, tensors) for key, v in zip(keys, node["values"], strict=True)}
    return [_unpack(value, tensors) for value in node] if isinstance(node, list) else node


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the states of the torch generators that a run on `device` uses."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Restore the states that `random_state` returned."""
    torch.set_rng_state(state["cpu"].to(torch.uint8))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].to(torch.uint8), device)
