"""Read and write the configurations of other systems."""
