"""Arguments of torchtitan and Megatron, with the files that define them; `plan --emit` may use no
others.
"""

from __future__ import annotations

TORCHTITAN = frozenset(
    {
        "parallelism.data-parallel-replicate-degree",
        "parallelism.data-parallel-shard-degree",
        "parallelism.tensor-parallel-degree",
        "parallelism.pipeline-parallel-degree",
        "parallelism.context-parallel-degree",
        "parallelism.expert-parallel-degree",
        "parallelism.fsdp-reshard-after-forward",
        "parallelism.enable-sequence-parallel",
        "parallelism.no-enable-sequence-parallel",
        "parallelism.pipeline-parallel-schedule",
        "parallelism.pipeline-parallel-microbatch-size",
        "training.local-batch-size",
        "training.global-batch-size",
        "training.seq-len",
        "training.max-norm",
        "training.steps",
        "training.mixed-precision-param",
        "training.enable-cpu-offload",
        "debug.seed",
        "compile.enable",
        "lr-scheduler.warmup-steps",
        "lr-scheduler.decay-ratio",
        "lr-scheduler.decay-type",
        "lr-scheduler.min-lr-factor",
    }
)
"""torchtitan 0.3.0 on PyPI: torchtitan/config/configs.py and
torchtitan/components/optimizer/lr_scheduler.py.
"""

MEGATRON_CORE = frozenset(
    {
        "tensor-model-parallel-size",
        "pipeline-model-parallel-size",
        "context-parallel-size",
        "expert-model-parallel-size",
        "sequence-parallel",
        "cp-comm-type",
        "bf16",
        "fp16",
        "recompute-granularity",
        "recompute-method",
        "recompute-num-layers",
        "overlap-grad-reduce",
        "overlap-param-gather",
        "use-distributed-optimizer",
        "use-megatron-fsdp",
        "data-parallel-sharding-strategy",
        "num-distributed-optimizer-instances",
        "lr",
        "min-lr",
        "weight-decay",
        "clip-grad",
        "optimizer",
        "adam-beta1",
        "adam-beta2",
        "adam-eps",
        "sgd-momentum",
    }
)
"""megatron-core 0.16.1 on PyPI: fields of TransformerConfig, DistributedDataParallelConfig and
OptimizerConfig.
"""

MEGATRON_TRAINING = frozenset(
    {
        "micro-batch-size",
        "global-batch-size",
        "train-iters",
        "lr-decay-style",
        "lr-warmup-iters",
        "lr-wsd-decay-style",
        "lr-wsd-decay-iters",
        "seq-length",
        "seed",
        "num-virtual-stages-per-pipeline-rank",
    }
)
"""Megatron-LM at 008e9cdb: megatron/training/config/training_config.py, and add_argument in
megatron/training/arguments.py.
"""
