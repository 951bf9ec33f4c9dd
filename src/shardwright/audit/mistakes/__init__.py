"""Known mistakes of trainers, the gradients they lead to, and the search for one that fits."""
