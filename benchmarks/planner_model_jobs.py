"""The models of `benchmarks.planner_models`, and the training loop of their libraries' documentation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpumem_toolkit.planning.job import Job, parse_tensor

VOCABULARY = 16000
LORA = {"r": 8, "lora_alpha": 16, "lora_dropout": 0.05}
TEXT = ("input_ids=int64[B,256]", "labels=int64[B,256]")
LABELS = ("input_ids=int64[B,256]", "attention_mask=int64[B,256]", "labels=int64[B]")
PIXELS, CLASSES = "float32[B,3,224,224]", "int64[B]"


def causal(name: str, **options: Any) -> nn.Module:
    """Return a small language model of transformers."""
    import transformers

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = getattr(transformers, f"{name}Config")(**{**sizes, **options})
    return getattr(transformers, f"{name}ForCausalLM")(config)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=512, n_layer=4, n_head=8, bos_token_id=1, eos_token_id=2)
    )


def llama() -> nn.Module:
    return causal("Llama")


def qwen2() -> nn.Module:
    return causal("Qwen2")


def qwen3() -> nn.Module:
    return causal("Qwen3", head_dim=64)


def qwen3_bf16() -> nn.Module:
    return qwen3().to(torch.bfloat16)


def mixtral() -> nn.Module:
    sizes = {"intermediate_size": 512, "num_local_experts": 4}
    return causal("Mixtral", experts_implementation="batched_mm", **sizes)


def llama_checkpointing() -> nn.Module:
    model: Any = llama()
    model.config.use_cache = False
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def llama_lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        llama(), LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], **LORA)
    )


def qwen2_lora_bf16() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(qwen2().bfloat16(), LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", **LORA))


def classifier(name: str, **options: Any) -> nn.Module:
    import transformers

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 384,
        "intermediate_size": 1536,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_labels": 4,
        "pad_token_id": 0,
    }
    config = getattr(transformers, f"{name}Config")(**{**sizes, **options})
    return getattr(transformers, f"{name}ForSequenceClassification")(config)


def bert() -> nn.Module:
    return classifier("Bert")


def deberta() -> nn.Module:
    # Without a problem type the model selects the labeled samples, and reads how many there are.
    sizes = {"pos_att_type": ["p2c", "c2p"], "position_buckets": 64, "problem_type": "single_label_classification"}
    return classifier("DebertaV2", relative_attention=True, **sizes)


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY, d_model=384, d_kv=64, d_ff=1024, num_layers=3, num_heads=6, decoder_start_token_id=0
        )
    )


def whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 6, "decoder_attention_heads": 6}
    sizes = {"vocab_size": VOCABULARY, "d_model": 384, "encoder_ffn_dim": 1536, "decoder_ffn_dim": 1536}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return WhisperForConditionalGeneration(WhisperConfig(**layers, **sizes, **tokens))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 6}
    return ViTForImageClassification(ViTConfig(num_labels=1000, **sizes))


def vit_lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(vit(), LoraConfig(target_modules="all-linear", modules_to_save=["classifier"], **LORA))


def timm_model(name: str) -> nn.Module:
    import timm

    return timm.create_model(name, pretrained=False, num_classes=1000)


def resnet() -> nn.Module:
    return timm_model("resnet50")


def convnext() -> nn.Module:
    return timm_model("convnext_atto")


def hiera() -> nn.Module:
    return timm_model("hiera_tiny_224")


def timm_vit() -> nn.Module:
    return timm_model("vit_tiny_patch16_224")


def efficientnet() -> nn.Module:
    return timm_model("efficientnet_b0")


def swin() -> nn.Module:
    return timm_model("swin_tiny_patch4_window7_224")


def unet() -> nn.Module:
    from diffusers import UNet2DModel

    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    return UNet2DModel(sample_size=64, block_out_channels=(64, 128), layers_per_block=2, **blocks)


def conditional_unet() -> nn.Module:
    from diffusers import UNet2DConditionModel

    blocks = {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    return UNet2DConditionModel(sample_size=32, block_out_channels=(64, 128), cross_attention_dim=256, **blocks)


def conditional_unet_lora() -> nn.Module:
    from peft import LoraConfig

    model: Any = conditional_unet()
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=4, target_modules=["to_k", "to_q", "to_v", "to_out.0"]))
    return model


def sample_loss(output: Any, target: Tensor) -> Tensor:
    """The loss of diffusers' training examples."""
    return functional.mse_loss(output.sample.float(), target.float(), reduction="mean")


def class_loss(output: Tensor, target: Tensor) -> Tensor:
    """The loss of timm's training examples."""
    return functional.cross_entropy(output, target)


def adafactor(parameters: Any) -> Any:
    from transformers import Adafactor

    return Adafactor(parameters)


@dataclass(frozen=True)
class ModelJob:
    """A model and its training, in the terms of `gpumem-exporter plan`. Without a loss the model returns it."""

    make: Callable[[], nn.Module]
    inputs: tuple[str, ...]
    batch: int = 8
    targets: tuple[str, ...] = ()
    loss: Callable[..., Tensor] | None = None
    optimizer: Callable[..., Any] = field(default=torch.optim.AdamW)
    precision: str = "fp32"


IMAGES = {"inputs": (PIXELS,), "targets": (CLASSES,), "loss": class_loss}
LATENTS = {"targets": ("float32[B,4,32,32]",), "loss": sample_loss}
CONDITIONED = ("float32[B,4,32,32]", "int64[B]", "float32[B,77,256]")
JOBS = {
    "transformers-gpt2": ModelJob(gpt2, TEXT),
    "transformers-llama-bf16-autocast": ModelJob(llama, TEXT, precision="bf16"),
    "transformers-llama-checkpointing": ModelJob(llama_checkpointing, TEXT),
    "transformers-qwen2": ModelJob(qwen2, TEXT),
    "transformers-qwen3-bf16": ModelJob(qwen3_bf16, TEXT),
    "transformers-qwen3-adafactor": ModelJob(qwen3, TEXT, optimizer=adafactor),
    "transformers-mixtral": ModelJob(mixtral, TEXT),
    "transformers-bert": ModelJob(bert, LABELS),
    "transformers-deberta-v2": ModelJob(deberta, LABELS),
    "transformers-t5": ModelJob(t5, ("input_ids=int64[B,256]", "labels=int64[B,128]")),
    "transformers-whisper": ModelJob(whisper, ("input_features=float32[B,80,3000]", "labels=int64[B,64]"), batch=4),
    "transformers-vit": ModelJob(vit, (f"pixel_values={PIXELS}", f"labels={CLASSES}"), batch=16),
    "peft-llama-lora": ModelJob(llama_lora, TEXT),
    "peft-qwen2-lora-bf16": ModelJob(qwen2_lora_bf16, TEXT),
    "peft-vit-lora": ModelJob(vit_lora, (f"pixel_values={PIXELS}", f"labels={CLASSES}"), batch=16),
    "timm-resnet50": ModelJob(resnet, **IMAGES),
    "timm-convnext": ModelJob(convnext, batch=16, precision="bf16", **IMAGES),
    "timm-vit": ModelJob(timm_vit, batch=16, precision="bf16", **IMAGES),
    "timm-efficientnet": ModelJob(efficientnet, **IMAGES),
    "timm-hiera": ModelJob(hiera, **IMAGES),
    "timm-swin": ModelJob(swin, **IMAGES),
    "diffusers-unet": ModelJob(unet, ("float32[B,3,64,64]", "int64[B]"), 8, ("float32[B,3,64,64]",), sample_loss),
    "diffusers-conditional-unet": ModelJob(conditional_unet, CONDITIONED, precision="fp16", **LATENTS),
    "diffusers-conditional-unet-lora": ModelJob(conditional_unet_lora, CONDITIONED, **LATENTS),
}


def make(given: ModelJob) -> nn.Module:
    """Return the model, with embeddings whose backward the emulated node can run.

    The backward of an embedding with a padding index or more than 3,072 indices reads counts from the device, and the
    node computes no values. All batches are smaller, except the indices of T5's relative positions.
    """
    model = given.make()
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None
            if name.endswith("relative_attention_bias"):
                module.requires_grad_(False)
    return model


def job(name: str) -> Job:
    """Return the job in the form of the planner."""
    given = JOBS[name]
    return Job(
        partial(make, given),
        tuple(map(parse_tensor, given.inputs)),
        tuple(map(parse_tensor, given.targets)),
        loss=given.loss or "auto",
        optimizer=given.optimizer,
        precision=given.precision,
        convolution="native",
    )


def train(given: ModelJob, steps: int, device: str) -> None:
    """The training script."""
    model = make(given).to(device).train()
    optimizer = given.optimizer([p for p in model.parameters() if p.requires_grad])
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(given.precision)
    scaler = torch.amp.GradScaler(device, enabled=given.precision == "fp16")
    for _ in range(steps):
        batch = [(spec.name, tensor(spec, given.batch).to(device)) for spec in map(parse_tensor, given.inputs)]
        named, positional = {name: x for name, x in batch if name}, [x for name, x in batch if not name]
        del batch
        targets = [tensor(spec, given.batch).to(device) for spec in map(parse_tensor, given.targets)]
        with torch.autocast(device, dtype=dtype) if dtype else nullcontext():
            output = model(*positional, **named)
            loss = output.loss if given.loss is None else given.loss(output, *targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def tensor(spec: Any, batch: int) -> Tensor:
    """Return an input as a loader does, on the host."""
    return torch.zeros(spec.at(batch), dtype=getattr(torch, spec.dtype))
