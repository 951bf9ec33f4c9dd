"""Results of communication are restored in order, and partial products before them are skipped."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shardwright.model.communication_results import (
    create_keeping_contexts,
    keep_result,
    keep_statistic,
    name_partial_product,
)
from shardwright.model.result_names import STATISTICS, get_result_name, name_results
from shardwright.numerics.packed_results import DetachedResult

M = 3
N = 4
K = 16
ONE = torch.ones(())
PRODUCTS: dict[str, Callable[[], Tensor]] = {
    "mm": lambda: torch.ones(M, K) @ torch.ones(K, N),
    "linear": lambda: torch.nn.functional.linear(torch.ones(1, M, K), torch.ones(N, K)),
    "addmm": lambda: torch.addmm(torch.ones(N), torch.ones(M, K), torch.ones(K, N)),
    "bmm": lambda: torch.bmm(torch.ones(2, M, K), torch.ones(2, K, N)),
    "8 bits": lambda: torch._scaled_mm(
        torch.ones(16, K).to(torch.float8_e4m3fn),
        torch.ones(32, K).to(torch.float8_e4m3fn).t(),
        ONE,
        ONE,
        out_dtype=torch.bfloat16,
    ),
}


def test_results_are_restored_by_name_in_their_order() -> None:
    numbers = iter(range(10))
    forward, again = create_keeping_contexts(frozenset(["gathered", STATISTICS]), DetachedResult)

    def communicate() -> list[float]:
        results = []
        for name in ("gathered", "down", "gathered"):
            with name_results(name):  # type: ignore[arg-type]
                results.append(float(keep_result(lambda: torch.tensor(float(next(numbers))))))
        return [*results, keep_statistic(lambda: next(numbers))]

    with forward:
        assert communicate() == [0.0, 1.0, 2.0, 3]
    with again:
        assert communicate() == [0.0, 4.0, 2.0, 3]
    assert communicate() == [5.0, 6.0, 7.0, 8]


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_before_a_restored_sum_takes_no_memory(name: str) -> None:
    forward, again = create_keeping_contexts(frozenset(["down"]), DetachedResult)
    expected = PRODUCTS[name]()

    def sum_product() -> tuple[Tensor, Tensor]:
        with name_results("down"):
            with name_partial_product():
                product = PRODUCTS[name]()
                with name_results(None):
                    other = torch.ones(M, K) @ torch.ones(K, N)
            keep_result(lambda: product)
        assert get_result_name() is None
        return product, other

    for context, is_skipped in ((forward, False), (again, True)):
        with context:
            product, other = sum_product()
        assert product.shape == expected.shape
        assert product.dtype == expected.dtype
        assert (product.untyped_storage().nbytes() <= 4) == is_skipped
        assert torch.equal(other, torch.full((M, N), float(K)))
        if not is_skipped:
            assert torch.equal(product, expected)


def test_a_product_is_computed_again_before_a_repeated_sum() -> None:
    forward, again = create_keeping_contexts(frozenset(["gathered"]), DetachedResult)
    for context in (forward, again):
        with context, name_results("down"), name_partial_product():
            product = torch.ones(M, K) @ torch.ones(K, N)
        assert torch.equal(product, torch.full((M, N), float(K)))


def test_a_restored_result_that_was_modified_is_refused() -> None:
    forward, again = create_keeping_contexts(frozenset(["down"]), DetachedResult)
    result = torch.ones(2)
    with forward, name_results("down"):
        keep_result(lambda: result)
    result += 1
    with again, name_results("down"), pytest.raises(AssertionError, match="was modified"):
        keep_result(lambda: result)
