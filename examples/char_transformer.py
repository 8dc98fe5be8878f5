"""A character-level transformer on several ranks: it reads Python's own documentation and writes more of it.

    python examples/char_transformer.py                                          # one process
    torchrun --nproc-per-node 2 examples/char_transformer.py                     # two, each with half of every batch
    torchrun --nproc-per-node 2 examples/char_transformer.py --parallel shard    # two, each with half of the model too

Alone it takes a few minutes, and prints a row every 100 steps; ``--steps 200`` is enough to see it learn. Where cores
are shared, ``OMP_NUM_THREADS=1`` is faster than more threads.

The text is what ``help("topics")`` shows, from the standard library, so nothing is downloaded. A batch is 32 windows of
it, however many ranks there are: each rank loads its own part of them, and all come to the same losses. The validation
loss is measured in the same way, with averaged weights (EMA), on the last tenth of the text.

The script has nothing about ranks but the argument ``parallel``, and one word of care: of a sharded State each rank
holds a part, so ``state.module()``, which puts the parts together, is called on all of them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader, Dataset

import pure_loop as pl
from pure_loop import Event

LENGTH = 64
RIGHT = pl.metrics.mean(lambda scores, batch: scores.argmax(dim=-1) == batch[1], "right")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--parallel", choices=("replicate", "shard"), default="replicate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="cpu, or cuda: each rank takes one of its machine's")
    parser.add_argument("--characters", type=int, default=600, help="how many it writes in the end")
    options = parser.parse_args(arguments)

    # Topics repeat each other: each paragraph counts once, so that none that is held out was learned. No tables.
    paragraphs = "\n\n".join(topics.values()).split("\n\n")
    text = "\n\n".join(dict.fromkeys(each for each in paragraphs if "---" not in each))
    alphabet = sorted(set(text))
    codes = torch.tensor([alphabet.index(character) for character in text])
    held_in, held_out = codes.split(len(codes) * 9 // 10 + 1)
    train = DataLoader(Windows(held_in), batch_size=32, shuffle=True)
    val = DataLoader(Windows(held_out, stride=LENGTH), batch_size=256)

    with pl.random.seeded(options.seed):
        network = GPT(len(alphabet))
    stream = pl.fit(
        network,
        train,
        loss=lambda scores, targets: cross_entropy(scores.flatten(0, 1), targets.flatten()),
        optimizer=pl.optim.adamw(lr=pl.schedules.cosine("1dur", peak=6e-3, warmup="0.1dur"), weight_decay=0.1),
        max_duration=f"{options.steps}ba",
        clip_grad=1.0,
        evaluators={"val": pl.Evaluator(val, metrics=[pl.metrics.loss(), RIGHT])},
        eval_interval="0.1dur",
        algorithms=[pl.algorithms.ema(half_life="0.02dur")],
        callbacks=[Report()],
        seed=options.seed,
        device=options.device,
        parallel=options.parallel,
    )
    for event, state in stream:
        if event is Event.FIT_END:
            trained = pl.algorithms.averaged(state).module()  # on all ranks, while they are together

    if pl.distributed.rank() == 0:
        start = [alphabet.index(character) for character in "The "]
        written = write(trained, start, options.characters, pl.random.generator(options.seed, "text"))
        print(f"\nwhat it writes:\n{''.join(alphabet[code] for code in written)}")
    return 0


class Report(pl.Callback):
    """A line for each evaluation. A callback runs on rank 0 alone, so nothing is printed twice."""

    def fit_start(self, state: pl.State, logger: pl.LoggerGroup) -> None:
        numbers = sum(tensor.numel() for tensor in state.params.values())
        print(f"{numbers:,} parameters, ranks: {pl.distributed.world_size()}")
        print("\n   step   characters   validation loss   right   seconds", flush=True)
        self.begun = time.perf_counter()

    def eval_after_all(self, state: pl.State, logger: pl.LoggerGroup) -> None:
        t, found, seconds = state.timestamp, state.metrics["val"], time.perf_counter() - self.begun
        print(
            f"{t.batch:7}   {t.token:10,}   {found['loss']:15.3f}   {found['right']:5.1%}   {seconds:7.1f}",
            flush=True,
        )


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Every stretch of ``LENGTH`` characters, and the same one character later. Only those asked for are cut out."""

    def __init__(self, codes: Tensor, stride: int = 1) -> None:
        self.codes, self.stride = codes, stride

    def __len__(self) -> int:
        return (len(self.codes) - LENGTH - 1) // self.stride + 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.codes[index * self.stride :][: LENGTH + 1]
        return window[:-1], window[1:]


class GPT(nn.Module):
    """Codes of shape (n, places) to scores of what comes next, of shape (n, places, characters)."""

    def __init__(self, characters: int, width: int = 96, heads: int = 3, layers: int = 2) -> None:
        super().__init__()
        self.character = nn.Embedding(characters, width)
        self.place = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, characters)

    def forward(self, codes: Tensor) -> Tensor:
        x = self.character(codes) + self.place(torch.arange(codes.shape[1], device=codes.device))
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.scores(self.norm(x))
        return scores


class Block(nn.Module):
    """Each place looks at those before it, and then thinks by itself."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.look = nn.Linear(width, 3 * width)
        self.seen = nn.Linear(width, width)
        self.think = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        n, places, width = x.shape
        looked = self.look(self.norms[0](x)).view(n, places, 3, self.heads, width // self.heads)
        query, key, value = looked.permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.seen(seen.transpose(1, 2).reshape(n, places, width))
        return x + self.think(self.norms[1](x))


def write(network: nn.Module, start: list[int], characters: int, random: torch.Generator) -> list[int]:
    """Go on from the codes of ``start``, one character after the other."""
    network.eval()
    device = next(network.parameters()).device
    codes = list(start)
    with torch.no_grad():
        for _ in range(characters):
            scores = network(torch.tensor([codes[-LENGTH:]], device=device))[0, -1].cpu()
            chances = (scores / 0.7).softmax(dim=0)
            codes.append(int(torch.multinomial(chances, 1, generator=random)))
    return codes


if __name__ == "__main__":
    sys.exit(main())
