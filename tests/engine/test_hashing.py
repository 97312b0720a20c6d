"""A hash changes with every bit of a tensor's memory and with the order of its words, at any alignment."""

from __future__ import annotations

import pytest
import torch

from toolkit.engine.hashing import COLUMNS, hash_tensors

CPU = torch.device("cpu")
BITS = {
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float64: torch.int64,
}


def hash_of(tensor: torch.Tensor) -> int:
    return int(hash_tensors([tensor], CPU)[0])


def numbers(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("count", [1, 3, 37])
def test_hash_changes_with_every_bit(dtype: torch.dtype, count: int) -> None:
    tensor = numbers(count, dtype)
    right, bits = hash_of(tensor), tensor.view(BITS[dtype])
    width = 8 * tensor.element_size()
    for index in range(count):
        for bit in range(width):
            mask = 1 << bit if bit < width - 1 else -(1 << bit)
            bits[index] ^= mask
            assert hash_of(tensor) != right, f"bit {bit} of element {index}"
            bits[index] ^= mask
    assert hash_of(tensor) == right


def test_hash_changes_with_every_column_of_many_rows() -> None:
    tensor = numbers(5 * 2 * COLUMNS + 3)
    right = hash_of(tensor)
    for index in range(len(tensor)):
        tensor.view(torch.int32)[index] ^= 1 << 22
        assert hash_of(tensor) != right
        tensor.view(torch.int32)[index] ^= 1 << 22


@pytest.mark.parametrize("dtype", BITS)
def test_unaligned_memory_has_the_same_hash(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.engine.hashing.COPY_CHUNK", COLUMNS)  # several pieces
    tensor = numbers(10_001, dtype)
    for start in (1, 2, 3):
        flat = torch.zeros(len(tensor) + start, dtype=dtype)
        flat[start:] = tensor
        assert hash_of(flat[start:]) == hash_of(tensor)


def test_hash_changes_with_swapped_words() -> None:
    tensor = numbers(4 * COLUMNS)
    right = hash_of(tensor)
    tensor[[0, 1, 2, 3]] = tensor[[2, 3, 0, 1]]
    assert hash_of(tensor) != right


def test_hash_is_independent_of_shape_and_layout() -> None:
    tensor = numbers(6 * 5).view(6, 5)
    assert hash_of(tensor) == hash_of(tensor.flatten())
    assert hash_of(tensor.T) == hash_of(tensor.T.contiguous()) != hash_of(tensor)
    assert hash_tensors([], CPU).shape == (0,)
    many = [numbers(count) for count in (1, 100, 1000)]
    assert hash_tensors(many, CPU).tolist() == [hash_of(each) for each in many]
    assert hash_of(torch.tensor(1.0)) != hash_of(torch.tensor(2.0))
