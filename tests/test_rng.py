"""Owned randomness."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from safetensors.torch import load

from fl_lightning.federation.state import serialise, unflatten
from fl_lightning.rng import (
    derive_seed,
    global_rng_saved,
    global_rng_state,
    load_global_rng_state,
    numpy_generator,
    owned_global_rng,
    torch_generator,
)


def test_a_seed_belongs_to_its_owner() -> None:
    assert derive_seed(0, 1, "3", "shuffle") == derive_seed(0, 1, "3", "shuffle")
    owners = [(0, 1, "3"), (0, "1", 3, "x"), (1, 1, "3"), (0, 13), (0, "1", "3", ""), (0, 2, "3")]
    assert len({derive_seed(*owner) for owner in owners}) == len(owners)
    assert all(0 <= derive_seed(seed, "x") < 2**63 for seed in range(200))


def test_seeds_never_change_between_versions() -> None:
    # A changed hash would change every number ever reported.
    assert derive_seed(0, 1, "client", "shuffle") == 802225517386459502
    assert torch.randperm(5, generator=torch_generator(0, "x")).tolist() == [3, 0, 4, 2, 1]
    assert numpy_generator(0, "x").permutation(5).tolist() == [4, 0, 1, 3, 2]


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))  # noqa: NPY002


def test_global_generators_are_lent_and_given_back() -> None:
    with owned_global_rng(0, "a"):
        first = draws()
    draws()
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # noqa: NPY002
    with owned_global_rng(0, "a"):
        assert draws() == first
    with owned_global_rng(0, "b"):
        assert draws() != first
    with pytest.raises(ZeroDivisionError), owned_global_rng(0, "c"):
        draws()[0] / 0
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # noqa: NPY002
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])


def test_saved_once_around_many_owners() -> None:
    with owned_global_rng(0, "a"):
        first, then = draws(), draws()
    before = states()
    with global_rng_saved():
        with owned_global_rng(0, "b"):
            draws()
        with owned_global_rng(0, "a"):
            assert draws() == first
            with owned_global_rng(0, "c"):  # who borrows from an owner still gives back to it
                draws()
            assert draws() == then
    assert states() == before


def states() -> tuple[object, ...]:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002


def test_the_global_generators_go_on_from_where_their_states_were_taken() -> None:
    def draw() -> list[float]:
        return [random.random(), random.gauss(0, 1), np.random.normal(), np.random.rand(), float(torch.randn(()))]  # noqa: NPY002

    with owned_global_rng(0, "states"):
        draw()  # gauss() and normal() keep a second number
        tree, tensors = serialise(global_rng_state())
        expected = [draw(), draw()]
        load_global_rng_state(unflatten(json.loads(json.dumps(tree)), load(tensors)))
        assert [draw(), draw()] == expected
