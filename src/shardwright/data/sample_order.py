"""Sample order: a function of seed and global position, never of the rank.

Position p of the run is the (p mod n)-th sample of epoch p // n. Every epoch is another
permutation of the n samples, computed one index at a time in constant memory, so the whole
state of the order is the integer p: a resumed run, a run on another layout and a run on other
hardware read the same samples at the same positions.
"""

from __future__ import annotations

from dataclasses import dataclass

_MASK_64 = (1 << 64) - 1
_NUM_ROUNDS = 6


def mix_bits(value: int) -> int:
    """Return 64 well-mixed bits of a 64-bit integer.

    Source: finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA 2014).

    >>> mix_bits(1) == mix_bits(1), mix_bits(1) == mix_bits(2)
    (True, False)
    """
    value = (value + 0x9E3779B97F4A7C15) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def permute(index: int, size: int, key: int) -> int:
    """Return the image of `index` under the permutation of range(size) with this `key`.

    A balanced Feistel network permutes the smallest even-bit power of two that is at least
    `size`. Cycle walking, repeating the network until the value is below `size`, restricts it
    to a permutation of range(size) (Black and Rogaway, CT-RSA 2002, section 3.3). The power of
    two is at most 4 x size, so the walk takes fewer than four steps on average.

    >>> sorted(permute(i, 5, key=7) for i in range(5))
    [0, 1, 2, 3, 4]
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    half_mask = (1 << half_bits) - 1
    while True:
        left = index >> half_bits
        right = index & half_mask
        for round_number in range(_NUM_ROUNDS):
            left, right = (
                right,
                left ^ (mix_bits(key ^ mix_bits(right * _NUM_ROUNDS + round_number)) & half_mask),
            )
        index = (left << half_bits) | right
        if index < size:
            return index


@dataclass(frozen=True)
class SampleOrder:
    """Infinite shuffled order over `num_samples` samples, epoch after epoch.

    >>> order = SampleOrder(seed=1, num_samples=4)
    >>> sorted(order.get_index(position) for position in range(4, 8)), order.get_epoch(7)
    ([0, 1, 2, 3], 1)
    """

    seed: int
    num_samples: int

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError(f"a sample order needs at least one sample, got {self.num_samples}")

    def get_epoch(self, position: int) -> int:
        """Return the epoch, from 0, of a global position."""
        return position // self.num_samples

    def get_index(self, position: int) -> int:
        """Return the index of the sample at a global position."""
        epoch, index = divmod(position, self.num_samples)
        return permute(index, self.num_samples, mix_bits(mix_bits(self.seed & _MASK_64) ^ epoch))
