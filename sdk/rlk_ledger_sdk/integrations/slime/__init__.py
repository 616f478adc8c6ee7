"""slime: hooks for its command line, which record both sides of a job. Nothing of slime is imported here.

    --custom-rollout-log-function-path rlk_ledger.integrations.slime.log_rollout
    --rollout-data-postprocess-path    rlk_ledger.integrations.slime.postprocess

Those two lines are enough. RLK_LEDGER and RLK_RUN_ID must reach the Ray workers (`runtime_env`); without them every
hook is the job's own function and nothing else. Stands on slime's main branch of autumn 2026 (docs/en/get_started/
customization.md, slime/rollout/sglang_rollout.py, slime/backends/megatron_utils/{actor,loss,model}.py, slime/utils/
types.py); read, not run: there is no slime without a GPU.

`log_rollout`         --custom-rollout-log-function-path   the batch with its rewards, the order, what is left out
`generate`            --custom-generate-function-path      every sample as soon as it is finished, exact version spans
`sample`              --rollout-sample-hook-path           the same beside a generate function of the job's own
`dynamic_filter`      --dynamic-sampling-filter-path       what dynamic sampling refuses, and why
`all_samples`         --rollout-all-samples-process-path   surplus of over-sampling, so that it is not missed
`postprocess`         --rollout-data-postprocess-path      training and reference log-probabilities, digests, layout
`before_log_prob`     --custom-megatron-before-log-prob-hook-path    the precision in force
`before_train_step`   --custom-megatron-before-train-step-hook-path  which update `tis` is in
`tis`                 --custom-tis-function-path           log-probabilities of the update, where no pass came before

A hook stands in front of the job's own function: name that in --custom-config-path (`rlk_generate_function_path`,
`rlk_tis_function_path`, `rlk_rollout_data_postprocess_path`, ...) or as RLK_GENERATE_FUNCTION_PATH and so on.
"""

from rlk_ledger_sdk.integrations.slime.framework import SLIME
from rlk_ledger_sdk.integrations.slime.rollout import RolloutHooks
from rlk_ledger_sdk.integrations.slime.training import TrainingHooks

_rollout, _training = RolloutHooks(SLIME), TrainingHooks(SLIME)

generate = _rollout.generate
sample = _rollout.sample
dynamic_filter = _rollout.dynamic_filter
all_samples = _rollout.all_samples
log_rollout = _rollout.log_rollout
postprocess = _training.postprocess
before_log_prob = _training.before_log_prob
before_train_step = _training.before_train_step
tis = _training.tis

__all__ = [
    "all_samples",
    "before_log_prob",
    "before_train_step",
    "dynamic_filter",
    "generate",
    "log_rollout",
    "postprocess",
    "sample",
    "tis",
]
