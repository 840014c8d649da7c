"""A logits processor for real vLLM: ends its process when a row carries ``vllm_xargs: {"poison": 1}``."""

from __future__ import annotations

import os
from typing import Any

from vllm.v1.sample.logits_processor import LogitsProcessor


class Poison(LogitsProcessor):
    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        pass

    def apply(self, logits: Any) -> Any:
        return logits

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: Any) -> None:
        for _, params, *_ in batch_update.added if batch_update else ():
            if (params.extra_args or {}).get("poison"):
                os._exit(1)
