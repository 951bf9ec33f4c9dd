"""Contenders: name -> module with `run(case, pace)`.

Only the rank that runs a contender imports its module, so that the imports of others do not count
in its memory.
"""

CONTENDERS = {
    "shardwright": "benchmarks.contenders.with_shardwright",
    "torch-loop": "benchmarks.contenders.with_torch",
    "torch-loop-own-decoder": "benchmarks.contenders.with_torch_own_decoder",
    "deepspeed": "benchmarks.contenders.with_deepspeed",
    "trainer": "benchmarks.contenders.with_trainer",
    "trainer-liger": "benchmarks.contenders.with_trainer",
    "torchtune": "benchmarks.contenders.with_torchtune",
}

TITLES = {
    "shardwright": "shardwright",
    "torch-loop": "hand-written PyTorch loop, transformers' model",
    "torch-loop-own-decoder": "hand-written PyTorch loop, shardwright's decoder",
    "deepspeed": "DeepSpeed, transformers' model",
    "trainer": "Hugging Face Trainer with Accelerate",
    "trainer-liger": "Hugging Face Trainer with liger-kernel",
    "torchtune": "torchtune, weights and moments in the precision of compute",
}
