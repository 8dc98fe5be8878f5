"""Fine-tuning a model of transformers with LoRA (peft), in bfloat16: the base is frozen, and adapters learn.

    pip install '.[examples]'
    python examples/finetune_lora.py         # trains a base, its adapters, resumes; draws finetune_lora.png

A Llama of two layers first learns Python's documentation, from the standard library, as the text of `help("topics")`.
That is the base. Then peft puts adapters of rank 8 beside each of its matrices, and they learn Python's source code, at
`precision="amp_bf16"`, in batches that a collator of transformers pads. Nothing is downloaded: the tokenizer is trained
here, too. (Without hardware for it, bfloat16 takes several times as long as float32.)

`CheckpointSaver(trained_only=True)` saves the adapters and their optimizer state alone. Training resumes a second time
from the file of its middle. Exit code 0 means: that came to the same State, bit for bit; no number of the base has
changed; and the perplexity of code fell by a quarter or more.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import sys
import tempfile
import typing
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import TypeAlias

import _compare
import _job_pictures
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.utils.data import DataLoader
from transformers import DataCollatorForLanguageModeling, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import pure_loop as pl
from pure_loop import Event
from pure_loop.callbacks import CheckpointSaver

# peft 0.21 calls what transformers 5.23 will remove.
warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)

Row: TypeAlias = dict[str, list[int]]
Curves: TypeAlias = dict[str, list[tuple[float, float]]]

PREFIX = "base_model.model."  # what peft puts before the names of the base
LORA = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=int, default=160, help="batches that the base is trained on")
    parser.add_argument("--batches", type=int, default=48, help="batches that the adapters are trained on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="finetune_lora.png", help="where the picture goes")
    parser.add_argument("--quick", action="store_true", help="60 batches and 12, and any gain is enough")
    options = parser.parse_args(arguments)
    base_batches, batches, goal = (60, 12, 1.0) if options.quick else (options.base, options.batches, 0.75)
    interval = "0.5dur" if options.quick else "0.125dur"
    torch.set_num_threads(1)  # The model is small: more threads would only wait for each other.

    tokenizer, prose, code = texts()
    loader = partial(DataLoader, collate_fn=DataCollatorForLanguageModeling(tokenizer, mlm=False))
    recipe = pl.Recipe(
        loader(prose[32:], 24, shuffle=True),
        loss=pl.Task.from_transformers(),
        optimizer=pl.optim.adamw(lr=pl.schedules.cosine("1dur", peak=5e-3, warmup="0.1dur")),
        max_duration=f"{base_batches}ba",
        evaluators={"prose": loader(prose[:32], 32), "code": loader(code[:32], 32)},
        eval_interval=interval,
        seed=options.seed,
    )
    base, base_curves = trained(recipe.fit(network(tokenizer, options.seed), clip_grad=1.0), "base")

    finetune = recipe.replace(
        train_dataloader=loader(code[32:], 12, shuffle=True),
        optimizer=pl.optim.adamw(lr=pl.schedules.cosine("1dur", peak=1e-2, warmup="0.1dur")),
        max_duration=f"{batches}ba",
        precision="amp_bf16",
    )

    def adapted() -> nn.Module:
        with pl.random.seeded(options.seed):
            return get_peft_model(base.module(), LORA)

    with tempfile.TemporaryDirectory() as folder:
        saver = CheckpointSaver(folder, interval=f"{batches // 2}ba", trained_only=True)
        state, curves = trained(finetune.fit(adapted(), callbacks=[saver]), "adapters")
        middle = next(Path(folder).glob(f"*-ba{batches // 2}.safetensors"))
        resumed, _ = trained(finetune.fit(adapted(), load_path=middle), "resumed")
        whole = Path(folder) / "whole.safetensors"
        pl.save(state, whole)
        sizes = {"trained_only=True": middle.stat().st_size, "the whole State": whole.stat().st_size}

    frozen = {
        name.removeprefix(PREFIX).replace(".base_layer", ""): name for name in state.params if "lora_" not in name
    }
    changed = [
        name for name, name_here in frozen.items() if not torch.equal(base.params[name], state.params[name_here])
    ]
    different = _compare.differences(resumed, state)
    report(state, base_curves, curves, sizes)
    print(f"\nthe base: {len(frozen)} tensors, {f'CHANGED: {changed}' if changed else 'bitwise as they were'}")
    print(f"resumed from batch {batches // 2}: {f'ANOTHER: {different[0]}' if different else 'bitwise the same'}")
    _job_pictures.lora(options.output, base_curves, curves, changes(state))
    print(f"picture: {options.output}")
    better = curves["code"][-1][1] <= goal * base_curves["code"][-1][1]
    return 0 if better and not changed and not different else 1


def trained(stream: pl.Stream, description: str) -> tuple[pl.State, Curves]:
    """The last State, and the perplexities of evaluations."""
    curves: Curves = {}
    for event, state in pl.progress(stream, description=description):
        if event is Event.EVAL_AFTER_ALL:
            for name, metrics in state.metrics.items():
                curves.setdefault(name, []).append((state.timestamp.batch, math.exp(metrics["loss"])))
    return state, curves


def report(state: pl.State, base_curves: Curves, curves: Curves, sizes: Mapping[str, int]) -> None:
    everything = sum(tensor.numel() for tensor in state.params.values())
    adapters = sum(tensor.numel() for name, tensor in state.params.items() if "lora_" in name)
    print(f"{adapters:,} of {everything:,} parameters are trained ({adapters / everything:.0%})")
    print("; ".join(f"{name}: {size / 1024:,.0f} KiB" for name, size in sizes.items()))
    print(f"\n{'perplexity':<12}base   with adapters")
    for name in curves:
        print(f"{name:<8}{base_curves[name][-1][1]:8.1f}{curves[name][-1][1]:16.1f}")


def changes(state: pl.State) -> list[tuple[str, float]]:
    """How large each adapter is beside its matrix: the norm of ``scale B A`` over that of ``W``."""
    params, scale = state.params, LORA.lora_alpha / LORA.r
    found = []
    for name, a in params.items():
        if ".lora_A." in name:
            b, w = (params[name.replace("lora_A.default", part)] for part in ("lora_B.default", "base_layer"))
            layer, *_, matrix = (
                name.removeprefix(PREFIX + "model.layers.").removesuffix(".lora_A.default.weight").split(".")
            )
            found.append((f"layer {layer}, {matrix.removesuffix('_proj')}", float(scale * (b @ a).norm() / w.norm())))
    return found


def network(tokenizer: PreTrainedTokenizerFast, seed: int) -> nn.Module:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
        use_cache=False,
    )
    with pl.random.seeded(seed):
        return LlamaForCausalLM(config)


def texts() -> tuple[PreTrainedTokenizerFast, list[Row], list[Row]]:
    """A tokenizer, and the tokens of paragraphs of documentation and of source code, in an order that is drawn."""
    prose = [part for text in topics.values() for part in text.split("\n\n") if "---" not in part]
    code = [part for module in (argparse, inspect, json, typing) for part in inspect.getsource(module).split("\n\n")]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=["<pad>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(prose + code, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>")

    def rows(parts: list[str]) -> list[Row]:
        parts = sorted({part for part in parts if len(part) > 40})
        order = torch.randperm(len(parts), generator=pl.random.generator(0, "texts")).tolist()
        return [{"input_ids": fast(parts[place])["input_ids"][:64]} for place in order]

    return fast, rows(prose), rows(code)


if __name__ == "__main__":
    sys.exit(main())
