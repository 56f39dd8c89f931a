"""Where every random draw gets its owner.

No library code draws from a global generator. A draw belongs to (run seed, round, client, purpose), never to a position
in a list or to how many draws came before it; so the order of clients and the number of workers cannot change a number.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch


def derive_seed(seed: int, *owner: object) -> int:
    """Hash a run seed and the owner of a draw to a seed in [0, 2^63).

    Args:
        seed: The run's seed.
        *owner: What the draw is for, for example ``(round, client, "shuffle")``. Integers and strings; their text counts.
    """
    text = "\x1f".join([str(int(seed)), *map(str, owner)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def torch_generator(seed: int, *owner: object, device: str | torch.device = "cpu") -> torch.Generator:
    """A torch generator for one owner."""
    return torch.Generator(device).manual_seed(derive_seed(seed, *owner))


def numpy_generator(seed: int, *owner: object) -> np.random.Generator:
    """A numpy generator for one owner."""
    return np.random.default_rng(derive_seed(seed, *owner))


@cache
def _cuda_available() -> bool:
    return torch.cuda.is_available()


_saved = False  # whether the global generators' states are kept already, by `global_rng_saved`


@contextmanager
def owned_global_rng(seed: int, *owner: object) -> Iterator[None]:
    """Lend the global generators (python, numpy, torch, CUDA) to one owner, then put them back as they were.

    For code that we do not own and that draws from them: weight initialisation, dropout, torchvision's transforms.
    """
    global _saved
    outside, _saved = _saved, False  # who borrows from this owner gives back to it
    state = None if outside else _global_state()
    value = derive_seed(seed, *owner)
    random.seed(value)
    np.random.seed(value % 2**32)  # noqa: NPY002
    torch.default_generator.manual_seed(value)  # torch.manual_seed looks for every kind of device: a millisecond
    if _cuda_available():
        torch.cuda.manual_seed_all(value)  # kept for later where CUDA has not been initialised yet
    try:
        yield
    finally:
        _saved = outside
        if state is not None:
            _put_back(*state)


@contextmanager
def global_rng_saved() -> Iterator[None]:
    """Keep the global generators' states once around many `owned_global_rng`, between which nobody draws.

    Numpy takes 0.1 ms to hand its state out and to take it back, which for a small client's turn is much.
    """
    global _saved
    outside, state = _saved, _global_state()
    _saved = True
    try:
        yield
    finally:
        _saved = outside
        _put_back(*state)


def global_rng_state() -> dict[str, Any]:
    """States of the global generators, as tensors and JSON values."""
    (version, words, *more), (kind, keys, *rest), state, cuda = _global_state()
    return {
        "python": (version, torch.tensor(words), *more),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), *rest),
        "torch": state,
        "cuda": cuda,
    }


def load_global_rng_state(state: dict[str, Any]) -> None:
    """Put the global generators where `global_rng_state` found them."""
    (version, words, *more), (kind, keys, *rest) = state["python"], state["numpy"]
    python, numpy = (version, tuple(words.tolist()), *more), (kind, keys.numpy().astype(np.uint32), *rest)
    _put_back(python, numpy, state["torch"], state["cuda"])


def _global_state() -> tuple[Any, ...]:
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda_states  # noqa: NPY002


def _put_back(python_state: Any, numpy_state: Any, torch_state: torch.Tensor, cuda_states: list[torch.Tensor]) -> None:
    random.setstate(python_state)
    np.random.set_state(numpy_state)  # noqa: NPY002
    torch.set_rng_state(torch_state)
    if cuda_states:
        torch.cuda.set_rng_state_all(cuda_states)
