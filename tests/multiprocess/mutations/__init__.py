"""Known wrong gradients as patches, and the table of the cells that must detect them."""
