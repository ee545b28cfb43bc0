"""Functions whose memory has a known remedy: a table for the phases of an error and for its advice."""

from __future__ import annotations

import re
from typing import NamedTuple

_VOCABULARY, _TOKENS = 16_384, 1_024
_HOST_LOAD = (
    'load the file into host memory, torch.load(path, map_location="cpu", mmap=True) or safetensors'
    ' load_file(path, device="cpu"), copy it to the device with load_state_dict, and delete it: otherwise the device'
    " has it twice"
)
_CHUNKED_LOSS = (
    "compute the loss in chunks of tokens instead of the logits of the whole batch at once:"
    " torch.nn.functional.linear_cross_entropy with its options (torch 2.13 and later), use_liger_kernel=True in"
    " transformers, or a loop over chunks under torch.utils.checkpoint"
)
_CACHE_LENGTH = (
    "limit the key-value cache: fewer sequences at a time (max_num_seqs in vLLM) and fewer tokens in each"
    ' (max_new_tokens, max_model_len), or cache_implementation="offloaded" in transformers'
)
_FUSED_ATTENTION = "use fused attention, which keeps no matrix of all pairs of tokens: "


class Cause(NamedTuple):
    """Code that a traceback may pass, and what helps if memory runs out in it."""

    kind: str
    """The kind of the advice."""
    code: str
    """A regular expression for the module and the function of a frame, as `module:function`."""
    text: str
    phase: str = ""
    """The phase that the code is, whose advice takes the place of the advice for activations."""
    variable: str = ""
    """An argument that must be set; with `least`, to a tensor or a layer of this size."""
    least: tuple[int, int] = (0, 0)
    """The least sizes of the last two dimensions of that tensor, or of the layer's weight."""

    def is_at(self, module: str, function: str) -> bool:
        """Whether a frame of this function is the code."""
        return re.fullmatch(self.code, f"{module}:{function}") is not None


# The likeliest cause first, of which each kind counts once.
CAUSES = (
    Cause(
        "host_copy",
        r"copy:deepcopy",
        "copy on the CPU: create the copy before the model is moved to the device and keep it there, or copy the values"
        " of state_dict() with .cpu()",
        "a copy",
    ),
    Cause(
        "host_load",
        r"torch\.serialization:_?load|safetensors\.torch:load_file|torch\.optim\.optimizer:load_state_dict",
        _HOST_LOAD,
        "loading",
    ),
    Cause(
        "assign",
        r"torch\.nn\.modules\.module:load_state_dict",
        'create the model on the meta device, load the file with map_location="cpu", and call load_state_dict(state,'
        " assign=True) before the model is moved: nothing is copied on the device",
        "loading",
    ),
    Cause(
        "load_dtype",
        r"transformers\.(modeling_utils:from_pretrained|core_model_loading:.*)",
        'load the model in bfloat16, from_pretrained(..., dtype="bfloat16"), or on several devices, device_map="auto"',
        "loading",
    ),
    Cause(
        "metric_on_host",
        r"torchmetrics\..*:.*",
        "keep the tensors of the metric in host memory: create it with compute_on_cpu=True, and reset it after each"
        " evaluation",
    ),
    Cause(
        "predictions_on_host",
        r"transformers\.trainer\w*:(evaluation|prediction)_(loop|step)",
        "move the predictions to host memory during the evaluation, TrainingArguments(eval_accumulation_steps=4), and"
        " keep only what the metric needs (preprocess_logits_for_metrics)",
    ),
    Cause(
        "tiling",
        r"diffusers\.models\.autoencoders\..*:_?(en|de)code",
        "encode and decode large images in tiles: vae.enable_tiling()",
    ),
    Cause(
        "fused_attention",
        r"transformers\..*:eager_attention_forward",
        f'{_FUSED_ATTENTION}from_pretrained(..., attn_implementation="sdpa")',
        variable="query",
        least=(_TOKENS // 4, 0),
    ),
    Cause(
        "fused_attention",
        r"torch\.nn\.functional:softmax",
        f"{_FUSED_ATTENTION}torch.nn.functional.scaled_dot_product_attention",
        variable="input",
        least=(_TOKENS, _TOKENS),
    ),
    Cause("chunked_loss", r"transformers\.loss\.loss_utils:For\w+LMLoss", _CHUNKED_LOSS),
    Cause(
        "chunked_loss",
        r"torch\.nn\.functional:(cross_entropy|log_softmax)",
        _CHUNKED_LOSS,
        "",
        "input",
        (0, _VOCABULARY),
    ),
    Cause("chunked_loss", r"torch\.nn\.modules\.linear:forward", _CHUNKED_LOSS, "", "self", (_VOCABULARY, 0)),
    Cause("cache_length", r"(transformers\.generation\..*|vllm\..*):.*", _CACHE_LENGTH),
    Cause("cache_length", r"torch\.nn\.modules\.module:_call_impl", _CACHE_LENGTH, "", "past_key_values"),
)
WITHOUT_ACTIVATIONS = {"metric_on_host", "predictions_on_host", "cache_length"}
"""Kinds of code that saves nothing for a backward pass."""
