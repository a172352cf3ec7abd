"""The processes that share one training run: one process, or all that `torchrun` started.

Each process takes its slice of every batch. The gradients are summed with the slices' weights, so a
step equals the step of a single process on the whole batch.
"""

import importlib
import itertools
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn

_groups = itertools.count()  # counts the process groups that this process created


@dataclass(frozen=True)
class Workers:
    """The rank of this process among the processes of a run.

    Attributes:
        rank: number of this process; 0 reports and writes.
        size: number of processes.
        device: the device on which this process computes.
    """

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, batch: Tensor | None) -> Any:
        """Return this process's slice of a batch; slice sizes differ by at most one row."""
        if self.size == 1 or batch is None:
            return batch
        return torch.tensor_split(batch, self.size)[self.rank]

    def reduce_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Sum the gradients over processes; each holds its slice's fraction of the mean."""
        if self.size == 1:
            return
        gradients = []
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        flat = torch.cat([gradient.flatten() for gradient in gradients])  # one message for all
        distributed.all_reduce(flat)
        parts = flat.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def total(self, value: Tensor) -> Tensor:
        """Return the sum of a scalar over processes."""
        if self.size > 1:
            value = value.detach().clone()
            distributed.all_reduce(value)
        return value

    def agree(self, value: float) -> float:
        """Return the first process's value, so that all processes take the same decision."""
        if self.size == 1:
            return value
        shared = torch.tensor(value, dtype=torch.float64, device=self.device)
        distributed.broadcast(shared, src=0)
        return shared.item()

    def gather(self, value: Tensor) -> list[Tensor]:
        """Return every process's tensor, in the order of their ranks."""
        if self.size == 1:
            return [value]
        values = [torch.empty_like(value, device=self.device) for _ in range(self.size)]
        distributed.all_gather(values, value.to(self.device))
        return [v.cpu() for v in values]

    def broadcast(self, module: nn.Module) -> None:
        """Copy the first process's parameters and buffers to every process."""
        if self.size > 1:
            with torch.no_grad():
                for value in module.state_dict().values():
                    distributed.broadcast(value, src=0)


def is_first_process() -> bool:
    """Return True in the process that writes and prints: the only one, or `torchrun`'s first."""
    return int(os.environ.get("RANK", "0")) == 0


def usable_device(device: str | torch.device) -> torch.device:
    """Return the device of a name; raise ValueError, with the available ones, if it is absent."""
    names = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        names.append("mps:0")
    try:
        torch_device = torch.device(device)
    except (RuntimeError, TypeError):
        torch_device = None
    if torch_device is None or f"{torch_device.type}:{torch_device.index or 0}" not in [
        "cpu:0",
        *names,
    ]:
        raise ValueError(f"device must be one of {', '.join(names)}, not {str(device)!r}")
    return torch_device


@contextmanager
def join_workers(device: str | torch.device) -> Iterator[Workers]:
    """Yield the workers of this run; under `torchrun`, create the process group if necessary."""
    device = torch.device(device)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    initialized = distributed.is_available() and distributed.is_initialized()
    if size == 1 and not initialized:
        yield Workers(0, 1, device)
        return
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    if not initialized:
        # The first optimizer of a process imports this module. If that happens while a process
        # group exists, the module keeps the group alive: its threads outlive
        # `destroy_process_group` and may abort the exit.
        importlib.import_module("torch._dynamo")
        # Every group has separate keys in the store: under the keys of an earlier group of this
        # process the others may find its addresses, where nobody listens any more.
        library: Any = distributed  # typed as Any: its stubs lack both functions
        store, rank, size = next(library.rendezvous("env://"))
        place = library.PrefixStore(f"group {next(_groups)}", store)
        kind = "nccl" if device.type == "cuda" else "gloo"
        distributed.init_process_group(kind, store=place, rank=rank, world_size=size)
    try:
        yield Workers(distributed.get_rank(), distributed.get_world_size(), device)
    finally:
        if not initialized:
            distributed.destroy_process_group()
