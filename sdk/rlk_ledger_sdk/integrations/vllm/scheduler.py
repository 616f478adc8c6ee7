"""Settings that live in the engine core, read from its running scheduler."""

from typing import Any


def settings_in_force(core: Any) -> dict[str, Any]:
    """What the scheduler of this engine core really does, by setting path."""
    scheduler = core.scheduler
    return {
        "scheduler.chunked_prefill": bool(scheduler.scheduler_config.enable_chunked_prefill),
        "scheduler.max_num_seqs": int(scheduler.max_num_running_reqs),
        "scheduler.max_num_batched_tokens": int(scheduler.max_num_scheduled_tokens),
        "scheduler.async": "Async" in type(scheduler).__name__,
        "kv_cache.prefix_caching": bool(scheduler.kv_cache_manager.enable_caching),
    }
