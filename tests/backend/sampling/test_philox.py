import numpy as np
import pytest

from backend.sampling.philox import philox4x32, uniforms

KNOWN = [  # counter, key, result: the known-answer vectors published with Random123
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_gives_the_published_words(counter: list[int], key: list[int], expected: list[int]) -> None:
    column = philox4x32(np.array(counter, np.uint32)[:, None], np.array(key, np.uint32)[:, None])
    assert column[:, 0].tolist() == expected


def test_many_columns_equal_one_at_a_time() -> None:
    seeds = np.array([0, 1, 2**63, 2**64 - 1, 7], np.uint64)
    positions = np.array([0, 1, 2**40, 3, 2**64 - 1], np.uint64)
    alone = [uniforms(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(5)]
    assert uniforms(seeds, positions).tolist() == alone


def test_key_and_counter_use_all_64_bits() -> None:
    high = np.array([1 << 32], np.uint64)
    low = np.array([1], np.uint64)
    zero = np.array([0], np.uint64)
    values = {float(uniforms(s, p)[0]) for s in (zero, low, high) for p in (zero, low, high)}
    assert len(values) == 9


def test_uniforms_spread_evenly_over_seeds_and_over_positions() -> None:
    counting = np.arange(20_000, dtype=np.uint64)
    for values in (uniforms(counting, counting * 0), uniforms(counting * 0, counting)):
        assert 0 <= values.min() < values.max() < 1
        counts = np.bincount((values * 100).astype(int), minlength=100)
        assert ((counts - 200) ** 2 / 200).sum() < 148  # chi-square, 99 degrees of freedom, p = 0.001
