"""`te.InferenceParams`: the keys and values of generation, over Octavo's KV caches.

    params.pre_step(OrderedDict({0: 10, 1: 7}))       before each step: how many new tokens each sequence has
    y = layer(x, inference_params=params)

Source: transformer_engine/pytorch/attention/inference.py of Transformer Engine 2.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from octavo.compat.planned import refuse
from octavo.modules import KVCache, PagedKVCache


class InferenceParams:
    """A KV cache for all attention layers of a model, with TE's arguments.

    Args:
        max_batch_size, max_sequence_length: sequences, and tokens of each, at most.
        num_heads_kv, head_dim_k, dtype, head_dim_v: asked for by TE; Octavo's caches take them from what they keep.
        is_paged, total_num_pages, page_size: a paged cache; `page_size` is needed then.
        max_ctx_len, qkv_format: of "thd", which is not built.

    Attributes:
        cache: the cache, `octavo.KVCache` or `octavo.PagedKVCache`.
        sequences: {id: tokens}, those of the current step included.
    """

    def __init__(
        self,
        max_batch_size: int,
        max_sequence_length: int,
        num_heads_kv: int | None = None,
        head_dim_k: int | None = None,
        dtype: torch.dtype | None = None,
        head_dim_v: int | None = None,
        is_paged: bool = False,
        total_num_pages: int | None = None,
        page_size: int | None = None,
        max_ctx_len: int | None = None,
        qkv_format: str = "bshd",
        custom_cache_manager: Any | None = None,
    ) -> None:
        if qkv_format == "thd":
            refuse("te.InferenceParams(qkv_format='thd')")
        if custom_cache_manager is not None:
            refuse("te.InferenceParams(custom_cache_manager=...)")
        if is_paged and page_size is None:
            raise ValueError("is_paged=True needs page_size: tokens of a page, such as 64")
        self.max_batch_size, self.max_sequence_length, self.is_paged = max_batch_size, max_sequence_length, is_paged
        self.num_heads_kv, self.head_dim_k, self.dtype = num_heads_kv, head_dim_k, dtype
        self.head_dim_v = head_dim_k if head_dim_v is None else head_dim_v
        self.input_qkv_format = qkv_format
        self.cache: KVCache | PagedKVCache
        if page_size is not None and is_paged:
            self.cache = PagedKVCache(max_batch_size, max_sequence_length, page_size, total_num_pages)
        else:
            self.cache = KVCache(max_batch_size, max_sequence_length)
        self.sequences: OrderedDict[Any, int] = OrderedDict()

    def pre_step(self, step_dict: Mapping[Any, int]) -> OrderedDict[Any, int]:
        """Say how many new tokens each sequence has in the step that begins.

        Args:
            step_dict: {id of a sequence: new tokens}, in the order of the batch.

        Raises:
            NotImplementedError: the batch is of other sequences than before: reset first.
        """
        if self.sequences and list(self.sequences) != list(step_dict):
            refuse(
                f"te.InferenceParams.pre_step with other sequences than before ({list(step_dict)} after"
                f" {list(self.sequences)}): call reset() first; a batch whose sequences come and go"
            )
        for sequence, count in step_dict.items():
            self.sequences[sequence] = self.sequences.get(sequence, 0) + int(count)
        self.cache.expect([int(count) for count in step_dict.values()])
        return self.sequences

    def reset(self) -> None:
        """Forget all sequences."""
        self.sequences = OrderedDict()
        self.cache.reset()
        self.cache.expect(None)


__all__ = ["InferenceParams"]
