"""Reducers: the arithmetic by hand, and bits that depend on neither workers nor the order of arrival."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from fl_lightning.aggregation import BLOCK_SIZE, Concatenate, Keep, Mean, Reducer, Sum, block_size
from fl_lightning.federation.engines.base import BlockReducer
from fl_lightning.message import Group, Message

Replies = list[tuple[str, Mapping[str, Tensor], float]]


def in_blocks(reducer: Reducer, replies: Replies, workers: int = 1) -> object:
    """Reduce as an engine does: every worker computes whole blocks, the blocks are merged in the cohort's order."""
    blocks = [replies[i : i + BLOCK_SIZE] for i in range(0, len(replies), BLOCK_SIZE)]
    computed: dict[int, object] = {}
    for worker in reversed(range(workers)):  # workers finish in any order
        for number in range(worker, len(blocks), workers):
            total = None
            for sender, tensors, weight in blocks[number]:
                total = reducer.add(total, tensors, weight, sender)
            computed[number] = total
    merged = None
    for number in range(len(blocks)):
        merged = reducer.merge(merged, computed[number])
    return reducer.finish(merged)


def random_replies(count: int, dtype: torch.dtype = torch.float32) -> Replies:
    draw = torch.Generator().manual_seed(0)
    scales = torch.rand(count, generator=draw, dtype=torch.float64) * 100
    return [
        (str(k), {"w": (torch.randn(33, generator=draw, dtype=torch.float64) * scales[k]).to(dtype)}, float(k + 1))
        for k in range(count)
    ]


def test_weighted_mean_and_sum_by_hand() -> None:
    replies: Replies = [("a", {"w": torch.tensor([1.0, 2.0])}, 1.0), ("b", {"w": torch.tensor([5.0, -2.0])}, 3.0)]
    assert in_blocks(Mean(), replies)["w"].tolist() == [4.0, -1.0]  # type: ignore[index]
    assert in_blocks(Sum(), replies)["w"].tolist() == [6.0, 0.0]  # type: ignore[index]


def test_bits_do_not_depend_on_workers() -> None:
    replies = random_replies(5 * BLOCK_SIZE + 3)
    once = in_blocks(Mean(), replies)["w"]  # type: ignore[index]
    for workers in (2, 3):
        assert torch.equal(in_blocks(Mean(), replies, workers)["w"], once)  # type: ignore[index]
    # The blocks are what makes it so: one long sum has other bits.
    straight = sum(w * r["w"] for _, r, w in replies) / sum(w for _, _, w in replies)
    assert not torch.equal(straight, once)
    torch.testing.assert_close(straight, once)


def test_block_reducer_reduces_in_the_fixed_blocks() -> None:
    replies = random_replies(2 * BLOCK_SIZE + 1)
    reducer = BlockReducer({"model": Group("update")}, lambda message: float(message.num_examples))
    for number, (key, tensors, weight) in enumerate(replies):
        reducer.add(Message(1, key, {"model": tensors}, num_examples=int(weight)))
        if (number + 1) % BLOCK_SIZE == 0:
            reducer.close_block()
    assert torch.equal(reducer.finish()["model"]["w"], in_blocks(Mean(), replies)["w"])  # type: ignore[index]


def test_float64_stays_float64() -> None:
    replies = random_replies(20, torch.float64)
    mean = in_blocks(Mean(), replies)["w"]  # type: ignore[index]
    exact = sum(w * r["w"] for _, r, w in replies) / sum(w for _, _, w in replies)
    assert mean.dtype == torch.float64
    torch.testing.assert_close(mean, exact, rtol=1e-14, atol=1e-14)


def test_bfloat16_is_summed_in_float32() -> None:
    # 1 + 255 x 2^-8 is 1.996; a sum kept in bfloat16 (8 bits) would stay at 1, since 1 + 2^-8 rounds back to 1.
    replies: Replies = [("0", {"w": torch.ones(1, dtype=torch.bfloat16)}, 1.0)]
    replies += [(str(k), {"w": torch.full((1,), 2.0**-8, dtype=torch.bfloat16)}, 1.0) for k in range(1, 256)]
    total = in_blocks(Sum(), replies)["w"]  # type: ignore[index]
    assert total.dtype == torch.bfloat16
    assert float(total) == 2.0


def test_integer_buffers_come_back_as_integers() -> None:
    replies: Replies = [("a", {"n": torch.tensor(3)}, 1.0), ("b", {"n": torch.tensor(8)}, 3.0)]
    mean = in_blocks(Mean(), replies)["n"]  # type: ignore[index]
    assert mean.dtype == torch.int64
    assert int(mean) == 7  # 6.75
    big: Replies = [("a", {"n": torch.tensor(2**40 + 1)}, 1.0)]
    assert int(in_blocks(Mean(), big)["n"]) == 2**40 + 1  # type: ignore[index]  # float32 could not hold it


def test_equal_replies_return_themselves() -> None:
    reply = {"w": torch.randn(50, generator=torch.Generator().manual_seed(1))}
    mean = in_blocks(Mean(), [(str(k), reply, 1.0 + k) for k in range(20)])
    torch.testing.assert_close(mean["w"], reply["w"], rtol=5e-7, atol=0)  # type: ignore[index]
    pair = in_blocks(Mean(), [("a", reply, 2.0), ("b", reply, 2.0)])  # powers of two: not a bit is lost
    assert torch.equal(pair["w"], reply["w"])  # type: ignore[index]


@pytest.mark.parametrize("place", [0, 1])
def test_a_client_that_weighs_nothing_has_no_influence(place: int) -> None:
    replies: Replies = [("a", {"w": torch.tensor([2.0])}, 2.0), ("b", {"w": torch.tensor([5.0])}, 1.0)]
    without = in_blocks(Mean(), replies)["w"]  # type: ignore[index]
    replies.insert(place, ("c", {"w": torch.tensor([float("nan")])}, 0.0))
    assert torch.equal(in_blocks(Mean(), replies)["w"], without)  # type: ignore[index]


def test_no_weight_at_all_is_an_error() -> None:
    with pytest.raises(ValueError, match="sum to 0"):
        in_blocks(Mean(), [("a", {"w": torch.ones(1)}, 0.0)])


def test_adding_does_not_change_a_reply() -> None:
    first, second = {"w": torch.ones(2)}, {"w": torch.ones(2)}
    in_blocks(Mean(), [("a", first, 1.0), ("b", second, 1.0)])
    assert first["w"].tolist() == second["w"].tolist() == [1, 1]


@pytest.mark.parametrize("number", [1, BLOCK_SIZE])  # within a block, and between blocks
@pytest.mark.parametrize(
    ("wrong", "what"),
    [({"v": torch.ones(2)}, r"missing \['w'\], extra \['v'\]"), ({"w": torch.ones(1)}, r"'w' as \(1,\).*as \(2,\)")],
)
def test_a_reply_that_differs_is_named(number: int, wrong: Mapping[str, Tensor], what: str) -> None:
    replies: Replies = [(str(k), {"w": torch.ones(2)}, 1.0) for k in range(number)]
    replies.append(("stranger", wrong, 1.0))
    with pytest.raises(ValueError, match=f"client stranger sent.*{what}"):
        in_blocks(Mean(), replies)
    if "v" in wrong:
        with pytest.raises(ValueError, match="client stranger sent"):
            in_blocks(Concatenate(), replies)


def test_rows_are_concatenated_in_the_order_of_the_cohort() -> None:
    replies: Replies = [
        (str(k), {"x": torch.full((k % 3, 2), float(k)), "y": torch.full((k % 3,), k)}, 1.0) for k in range(20)
    ]
    for workers in (1, 2, 3):
        rows = in_blocks(Concatenate(), replies, workers)
        expected = [k for k in range(20) for _ in range(k % 3)]
        assert rows["y"].tolist() == expected  # type: ignore[index]
        assert rows["x"][:, 0].tolist() == expected  # type: ignore[index]


def test_keep_keeps_every_client_apart() -> None:
    replies: Replies = [(str(k), {"w": torch.full((1,), float(k))}, 1.0) for k in range(BLOCK_SIZE + 2)]
    kept = in_blocks(Keep(), replies, 2)
    assert list(kept) == [str(k) for k in range(BLOCK_SIZE + 2)]  # type: ignore[call-overload]
    assert all(float(held["w"]) == float(key) for key, held in kept.items())  # type: ignore[attr-defined]


def test_blocks_are_few_in_a_large_cohort() -> None:
    assert [block_size(n) for n in (0, 1, 256, 257, 10_000)] == [8, 8, 8, 9, 313]
    reducer = BlockReducer({"model": Group("update")}, lambda message: 1.0, 9)
    merged = []
    reducer.merge = lambda block: merged.append(block["model"][1])  # type: ignore[method-assign]
    for number in range(20):
        reducer.add(None if number == 4 else Message(1, str(number), {"model": {"w": torch.ones(1)}}))
    reducer.close_block()
    assert merged == [8, 9, 2]
