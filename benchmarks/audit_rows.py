"""Rows of docs/audit/findings.md: worked examples with options, and what their results mean.

Every cause was read in the trainer's source of the named version; line numbers are of that version.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from importlib import metadata

INTRODUCTION = """
Each row runs a small Llama (rows `router-...`: Mixtral; `shardwright-ep`: Qwen3-MoE) on two CPU
ranks in float32 with rows of unequal numbers of supervised tokens (but `trl-wrapped`) and four
micro-batches a step (but `fsdp2-loop`: one), records the second optimizer step (`fsdp2-loop` and
`shardwright-...`: the first) with `Recorder`, and compares it with one process. The definition is
the one that users expect: the sum over the supervised tokens of the global batch over their number;
for DPO the mean over its pairs. In `trl-wrapped` and the rows of DPO every micro-batch has equally
many tokens or pairs, so these rows do not show by which number the trainer divides. `residual` is
the norm of the difference of all gradients over the norm of the recorded ones.

"by design": the trainer divides by the numbers of micro-batches and ranks on purpose, so its step
is the mean of the micro-batches' means. If all micro-batches have equally many supervised tokens,
both definitions agree; otherwise tokens of micro-batches with few of them weigh more. The rows
`-counted` show loops that divide by the tokens of the global batch.

"defect": two rows. `axolotl`: its check for a model that takes the count of tokens fails for Llama
(reported: https://github.com/axolotl-ai-cloud/axolotl/pull/3982), so micro-batches are averaged
although the class of transformers takes the count. With the flag set back to true by hand the audit
names the mean over ranks, as `average_tokens_across_devices=False` asks
(axolotl/core/builders/base.py:678). `router-transformers`: the factor of the router's auxiliary
loss depends on the numbers of ranks and of micro-batches, and on `router_aux_loss_coef`. The factor
of the ranks is reported (https://github.com/huggingface/transformers/issues/48690). Expected is the
mean over the micro-batches of each one's auxiliary loss times `router_aux_loss_coef`, as in one
process with accumulation and as TRL computes it (`router-trl`). The loss of a micro-batch is not
linear in its tokens, so one process with other micro-batches gets another mean; that is not counted
as a difference.

Not in the table:

- The Trainer of transformers with tensor parallelism, which Accelerate refuses on a CPU
  (accelerate/parallelism_config.py:395), and with `fsdp=...`, which Accelerate uses only on
  accelerators (`AcceleratorState.__init__`, accelerate/state.py:986, read, not run).
- torchtitan 0.3.0: it installs, but cannot train a language model on a CPU.
  `import torchtitan.trainer` needs triton
  (torchtitan/distributed/minimal_async_ep/kernels.py:10, run). Its language models have the
  attention kernels `flex`, `flex_flash` and `varlen` only
  (torchtitan/models/common/config_utils.py:83-103). On a CPU FlexAttention refuses a backward pass
  (torch/nn/attention/flex_attention.py:2083) and varlen attention has no kernel (both run).
- Axolotl's packed rows. The row `axolotl` needs an environment of its own, because Axolotl 0.19.0
  requires transformers 5.16.1: `pip install axolotl==0.19.0`, and this repository's `src` in
  PYTHONPATH. On a CPU it trains with two settings that its recipe lacks: `device_map` "cpu", which
  the example sets after the recipe is read (axolotl/utils/config/__init__.py:230 sets the
  accelerator of the local rank), and the environment variable ACCELERATE_USE_CPU, without which
  ranks without GPUs train separate models. Its preparation of rows spawns a process
  (datasets/arrow_dataset.py:1906) that imports the main script again, so a script needs
  `if __name__ == "__main__":`.

A row says nothing about other settings of the same trainer, nor about GPUs.
"""
DEFECT = "defect"
DESIGN = "by design"
_PACKAGES = ("torch", "transformers")
_DISTRIBUTIONS = {"ignite": "pytorch-ignite"}
"""Names of packages in the index, where they are not the module's."""


@dataclass(frozen=True)
class FindingRow:
    """A worked example with options, and what its result means.

    `expected` are the mistakes of the first diagnosis; empty where the audit passes. `cause` is
    hand-written, and names the place in the trainer's source where the audit does not pass.
    """

    name: str
    trainer: str
    package: str
    setting: str
    example: str
    arguments: tuple[str, ...] = ()
    expected: tuple[str, ...] = ()
    verdict: str = ""
    """Name of the difference; empty where the audit passes."""
    cause: str = ""
    others: tuple[str, ...] = ()
    """Further packages that the example needs."""
    check: tuple[str, ...] = ()
    """Options of `shardwright audit check`."""

    @property
    def command(self) -> str:
        """The example's command, as a reader types it."""
        script = f"docs/audit/{self.example}.py"
        return " ".join(("torchrun --nproc-per-node 2", script, *self.arguments))

    @property
    def check_command(self) -> str:
        """The command of the check, as a reader types it."""
        return " ".join(("shardwright audit check audit", *self.check))

    def list_missing_packages(self) -> list[str]:
        """List the packages of this row that are not installed."""
        packages = (self.package, *self.others)
        return [name for name in packages if importlib.util.find_spec(name) is None]

    def read_versions(self) -> dict[str, str]:
        """Read the versions of torch, transformers and the packages of this row."""
        names = dict.fromkeys((*_PACKAGES, self.package, *self.others))
        return {
            name: metadata.version(_DISTRIBUTIONS.get(name, name))
            for name in names
            if name != "shardwright"
        }


_ACCELERATE = (
    "Documented: `Accelerator.backward` divides by the accumulation "
    "(accelerate/accelerator.py:2851), DDP averages over ranks."
)
_DEEPSPEED = (
    "Documented (`gradient_accumulation_steps`). `DeepSpeedEngine.backward` divides by the "
    "accumulation (deepspeed/runtime/engine.py:3413), {place} averages over ranks."
)
_LIGHTNING = (
    "`ClosureResult.from_training_step_output` divides the loss by `accumulate_grad_batches` "
    "(lightning/pytorch/loops/optimization/automatic.py:83), DDP averages over ranks."
)
_IGNITE = (
    "`supervised_training_step` divides the loss by `gradient_accumulation_steps` "
    "(ignite/engine/__init__.py:132), DDP averages over ranks."
)
_OWN_TOKENS = (
    "The option's meaning: `Trainer._get_num_items_in_batch` sums the count over ranks only with "
    "it (transformers/trainer.py:2340), DDP averages. The reported loss is the same mean."
)
_ROUTER = (
    "The model adds coefficient x auxiliary loss to a loss that is already divided by the global "
    "count of tokens (transformers/models/mixtral/modeling_mixtral.py:631), and "
    "`Trainer.compute_loss` multiplies the sum by the ranks (transformers/trainer.py:2207). DDP "
    "averages over ranks, and with such a count the Trainer does not divide by the accumulation "
    "(transformers/trainer.py:2111), so the auxiliary loss counts 2 x 4 times. The reported loss "
    "has the same factor."
)
_AXOLOTL = (
    "`AxolotlTrainer.__init__` sets `model_accepts_loss_kwargs` to False unless `forward` of the "
    "inner model has a parameter named `num_items_in_batch` (axolotl/core/trainers/base.py:118-131)"
    "; those of transformers take it through `**kwargs` of the outer model. The Trainer then "
    "averages over the tokens of each micro-batch (trainer.py:2009 of transformers 5.16.1) and "
    "divides by the accumulation (there, line 1963), DDP averages over ranks."
)
_DEEPSPEED_PLACES = {
    0: "`allreduce_bucket` (deepspeed/runtime/engine.py:3813)",
    1: "`average_tensor` (deepspeed/runtime/zero/stage_1_and_2.py:1688)",
    2: "`average_tensor` (deepspeed/runtime/zero/stage_1_and_2.py:1688)",
    3: "`reduce_scatter_coalesced` (deepspeed/runtime/comm/coalesced_collectives.py:124)",
}
_DEEPSPEED_NOTES = {3: " (parameters below its persistence threshold, all of these, stay whole)"}
_MEANS = ("mean_of_micro_batch_means",)


def _build_trl(name: str, setting: str, *arguments: str) -> FindingRow:
    return FindingRow(
        name, "TRL SFTTrainer", "trl", setting, "trl_sft", arguments, others=("peft", "datasets")
    )


def _build_deepspeed(stage: int) -> FindingRow:
    return FindingRow(
        f"deepspeed-{stage}",
        "DeepSpeed",
        "deepspeed",
        f"ZeRO {stage}{_DEEPSPEED_NOTES.get(stage, '')}, the model's own loss",
        "deepspeed_loop",
        (str(stage),),
        _MEANS,
        DESIGN,
        _DEEPSPEED.format(place=_DEEPSPEED_PLACES[stage]),
    )


def _build_engine(name: str, setting: str, layout: str) -> FindingRow:
    return FindingRow(
        f"shardwright-{name}",
        "shardwright",
        "shardwright",
        setting,
        "shardwright_engine",
        (layout,),
    )


def _build_trainer_with_deepspeed(stage: int) -> FindingRow:
    return FindingRow(
        f"transformers-deepspeed-{stage}",
        "transformers Trainer",
        "transformers",
        f"DeepSpeed, ZeRO {stage}{_DEEPSPEED_NOTES.get(stage, '')}",
        "hf_trainer_deepspeed",
        (str(stage),),
        others=("accelerate", "deepspeed"),
    )


_DPO = ("--objective", "dpo", "--beta", "0.3")

ROWS: tuple[FindingRow, ...] = (
    FindingRow("ddp-loop", "hand-written loop, torch", "torch", "DDP", "ddp_loop"),
    FindingRow(
        "fsdp2-loop",
        "hand-written loop, torch",
        "torch",
        "FSDP2, shards of unequal sizes",
        "fsdp2_loop",
    ),
    FindingRow(
        "accelerate",
        "Accelerate",
        "accelerate",
        "DDP, `accumulate`, the model's own loss",
        "accelerate_loop",
        (),
        _MEANS,
        DESIGN,
        _ACCELERATE,
    ),
    FindingRow(
        "accelerate-counted",
        "Accelerate",
        "accelerate",
        "DDP, a loop that counts the tokens of the global batch",
        "accelerate_loop",
        ("--count-tokens",),
    ),
    FindingRow(
        "transformers-ddp",
        "transformers Trainer",
        "transformers",
        "DDP",
        "hf_trainer",
        others=("accelerate",),
    ),
    FindingRow(
        "transformers-fsdp2",
        "transformers Trainer",
        "transformers",
        "FSDP2, sharded by transformers (`DistributedConfig(fsdp_size=2)`)",
        "hf_trainer_sharded",
        others=("accelerate",),
    ),
    _build_trainer_with_deepspeed(2),
    _build_trainer_with_deepspeed(3),
    FindingRow(
        "router-transformers",
        "transformers Trainer",
        "transformers",
        "DDP, Mixtral with `output_router_logits=True`",
        "router_loss",
        ("transformers",),
        ("router_loss_multiplied_by_ranks", "router_loss_multiplied_by_accumulation"),
        DEFECT,
        _ROUTER,
        ("accelerate",),
    ),
    FindingRow(
        "router-trl",
        "TRL SFTTrainer",
        "trl",
        "DDP, Mixtral with `router_aux_loss_coef`",
        "router_loss",
        ("trl",),
        others=("datasets",),
    ),
    _build_trl("trl", "DDP, padded rows"),
    _build_trl("trl-completion", "DDP, padded rows, completions only", "--completion-only"),
    _build_trl(
        "trl-packing", "DDP, packed rows (best fit), 43 or 44 targets a micro-batch", "--packing"
    ),
    _build_trl(
        "trl-packing-completion",
        "DDP, packed rows (best fit), completions only",
        "--packing",
        "--completion-only",
    ),
    _build_trl("trl-padding-free", "DDP, rows joined without padding", "--padding-free"),
    FindingRow(
        "trl-wrapped",
        "TRL SFTTrainer",
        "trl",
        'DDP, `packing_strategy="wrapped"`: a row counts as one document, as the trainer passes '
        "it; 46 targets in every micro-batch",
        "trl_sft",
        ("--wrapped",),
        others=("peft", "datasets"),
    ),
    FindingRow(
        "trl-own-tokens",
        "TRL SFTTrainer",
        "trl",
        "DDP, `average_tokens_across_devices=False`",
        "trl_sft",
        ("--own-tokens",),
        ("mean_of_rank_means",),
        "by choice of the option",
        _OWN_TOKENS,
        ("peft", "datasets"),
    ),
    FindingRow(
        "trl-dpo",
        "TRL DPOTrainer",
        "trl",
        "DDP, a reference model, two pairs in every micro-batch",
        "trl_dpo",
        others=("peft", "datasets"),
        check=(*_DPO, "--reference", "reference"),
    ),
    FindingRow(
        "trl-dpo-lora",
        "TRL DPOTrainer",
        "trl",
        "DDP, PEFT's LoRA, the model without it as reference, two pairs in every micro-batch",
        "trl_dpo",
        ("--lora",),
        others=("peft", "datasets"),
        check=_DPO,
    ),
    FindingRow(
        "peft-lora",
        "PEFT",
        "peft",
        "LoRA in TRL's SFTTrainer, DDP",
        "trl_sft",
        ("--lora",),
        others=("trl", "datasets"),
    ),
    _build_deepspeed(0),
    _build_deepspeed(1),
    _build_deepspeed(2),
    _build_deepspeed(3),
    FindingRow(
        "deepspeed-3-counted",
        "DeepSpeed",
        "deepspeed",
        f"ZeRO 3{_DEEPSPEED_NOTES[3]}, tokens of the global batch counted",
        "deepspeed_loop",
        ("3", "--count-tokens"),
    ),
    FindingRow(
        "axolotl",
        "Axolotl",
        "axolotl",
        "DDP, padded rows in an order that differs between runs",
        "axolotl_trainer",
        (),
        _MEANS,
        DEFECT,
        _AXOLOTL,
    ),
    FindingRow(
        "lightning",
        "Lightning Trainer",
        "lightning",
        "DDP, `accumulate_grad_batches=4`, the model's own loss",
        "lightning_trainer",
        (),
        _MEANS,
        DESIGN,
        _LIGHTNING,
    ),
    FindingRow(
        "ignite",
        "Ignite `create_supervised_trainer`",
        "ignite",
        "DDP, `gradient_accumulation_steps=4`, the model's own loss",
        "ignite_trainer",
        (),
        _MEANS,
        DESIGN,
        _IGNITE,
    ),
    _build_engine("zero-1", "ZeRO 1", "zero_stage=1,dp_shard=2"),
    _build_engine("zero-3", "ZeRO 3", "zero_stage=3,dp_shard=2"),
    _build_engine("tp", "tensor parallelism", "tp=2"),
    _build_engine("pp", "pipeline parallelism, 1F1B", "pp=2"),
    _build_engine("cp", "context parallelism, ring", "cp=2,cp_method=ring"),
    _build_engine(
        "ep", "expert parallelism of a sparse model, ZeRO 3", "zero_stage=3,dp_shard=2,ep=2"
    ),
)
