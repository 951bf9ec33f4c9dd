"""Expert parallelism: exchanges of rows between the ranks of `ep`."""
