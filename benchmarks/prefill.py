"""What windows of prompts alone cost: pass keys, true and generated continuations of long prompts.

    python benchmarks/prefill.py own=FOLDER 'window=FOLDER@own+window(size=256,first=4)' \
        'prefill=FOLDER@own+window(size=256,first=4,prefill=true)' \
        --text book.txt --out prefill.json

A prompt is a piece of FILE that hides the pass keys of five cities, five digits each. A model reads
it once. Then it is asked for each key: the question continues the prompt (`prompt`), or its tokens
are read one by one, as generated ones are (`steps`; the same unless the positions have `prefill`).
An answer is right if greedy decoding gives the whole key. The tokens that follow the piece in FILE
give a perplexity, one by one, and as many are generated greedily. The command continues its record.
"""

from __future__ import annotations

import copy
import json
import random
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from fairseq_posenc.hf import read_positions
from fairseq_posenc.hf.folders import load_tokenizer
from fairseq_posenc.workbench.experiments.length.hf_model import load, parse_models, tokenize_text
from fairseq_posenc.workbench.results.intervals import interval, interval_of_perplexity
from fairseq_posenc.workbench.results.record import Record, Row
from fairseq_posenc.workbench.running.devices import ComputeOptions
from measuring.commands import exit_on_error, new_parser, own_command

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
CITIES = ("Oslo", "Cairo", "Lima", "Tokyo", "Rome", "Delhi", "Paris", "Boston", "Sydney", "Berlin")
NEEDLE = (
    "\n\nThe secret pass key of {city} is {key}. Remember it: {key} is the pass key of {city}.\n\n"
)
QUESTION = "\n\nWhat is the secret pass key of {city}? The secret pass key of {city} is"
CONTINUATION = 64  # tokens


class Prompt(NamedTuple):
    """A piece of a text with hidden pass keys, in tokens."""

    text: Tensor  # `(1, T)`
    later: Tensor  # the tokens that follow the piece, `(1, CONTINUATION)`
    questions: Sequence[Tensor]  # for each key, `(1, Q)`
    keys: Sequence[Tensor]  # `(1, A)`


def hide_keys(tokens: Tensor, tokenizer: Any, length: int, number: int, texts: int) -> Prompt:
    """Hide pass keys in piece ``number`` of ``texts`` pieces, which are spread over ``tokens``."""

    def encode(text: str) -> Tensor:
        return torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])

    generator = random.Random(number)
    cities = generator.sample(CITIES, len(DEPTHS))
    keys = [str(generator.randrange(10_000, 100_000)) for _ in DEPTHS]
    needles = [encode(NEEDLE.format(city=city, key=key)) for city, key in zip(cities, keys)]
    room = length - sum(map(len, needles))
    end = max((len(tokens) - CONTINUATION) * (number + 1) // texts, room)
    cuts = [0, *(round(room * depth) for depth in DEPTHS), room]
    parts = [tokens[end - room :][low:high] for low, high in zip(cuts, cuts[1:])]
    pieces = [piece for pair in zip(parts, needles) for piece in pair]
    return Prompt(
        torch.cat([*pieces, parts[-1]])[None],
        tokens[None, end : end + CONTINUATION],
        [encode(QUESTION.format(city=city))[None] for city in cities],
        [encode(f" {key}")[None] for key in keys],
    )


class Reader:
    """A model that has read a prompt; the prompt is read once, and continued several times."""

    def __init__(self, model: PreTrainedModel, prompt: Tensor) -> None:
        self.model: Any = model
        self.cache = DynamicCache(config=model.config)
        self.logits = self.run(prompt)  # of the next token

    def copy(self) -> Reader:
        """Copy what was read; the model stays the same."""
        other = copy.copy(self)
        other.cache = copy.deepcopy(self.cache)
        return other

    def run(self, tokens: Tensor) -> Tensor:
        """Read tokens, ``(1, T)``, at once; return the logits of the next one, ``(V,)``."""
        output = self.model(tokens, cache=self.cache, use_cache=True, logits_to_keep=1)
        self.logits = output.logits[0, -1].float()
        return self.logits

    def score(self, tokens: Tensor) -> Tensor:
        """Read tokens one by one; return the logits that predict them, ``(T, V)``."""
        logits = []
        for token in tokens.split(1, 1):
            logits.append(self.logits)
            self.run(token)
        return torch.stack(logits)

    def generate(self, count: int) -> list[int]:
        """Generate tokens greedily."""
        made: list[int] = []
        while len(made) < count:
            made.append(int(self.logits.argmax()))
            self.run(torch.tensor([made[-1:]]))
        return made


@torch.no_grad()
def measure(model: PreTrainedModel, tokenizer: Any, prompt: Prompt) -> dict[str, Any]:
    """Ask a model for all keys of a prompt, and let it continue the prompt."""
    reader = Reader(model, prompt.text)
    row: dict[str, Any] = {}
    has_prefill = "prefill=true" in read_positions(model)
    for way in ("prompt", "steps") if has_prefill else ("prompt",):
        right, log_probability = [], []
        for question, key in zip(prompt.questions, prompt.keys):
            asked = reader.copy()
            for part in question.split(1 if way == "steps" else question.size(1), 1):
                asked.run(part)
            logits = asked.score(key)
            right.append(int(torch.equal(logits.argmax(-1), key[0])))
            chosen = logits.log_softmax(-1).gather(1, key[0, :, None])
            log_probability.append(round(float(chosen.sum()), 3))
        row |= {f"right_{way}": right, f"log_probability_{way}": log_probability}
    chosen = reader.copy().score(prompt.later).log_softmax(-1).gather(1, prompt.later[0, :, None])
    made = reader.generate(CONTINUATION)
    return {**row, "loss": -float(chosen.mean()), "made": made, "text_made": tokenizer.decode(made)}


def summarise(rows: Sequence[Row]) -> list[Row]:
    """Summarise each model, with intervals over the prompts; the first model is compared with."""
    first = {row["prompt"]: row for row in rows if row["model"] == rows[0]["model"]}
    found: list[Row] = []
    for name in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == name]
        figures: dict[str, Any] = {"model": name, "prompts": len(own)}
        for way in ("prompt", "steps"):
            if f"right_{way}" in own[0]:
                for column in (f"right_{way}", f"log_probability_{way}"):
                    figures |= interval(fmean(row[column]) for row in own).figures(column)
                changes = (
                    fmean(row[f"right_{way}"]) - fmean(first[row["prompt"]]["right_prompt"])
                    for row in own
                )
                figures |= interval(changes).figures(f"change_{way}")
        losses = torch.tensor([row["loss"] for row in own]).exp().tolist()
        figures |= interval_of_perplexity(losses).figures("perplexity")
        ratios = [row["loss"] - first[row["prompt"]]["loss"] for row in own]
        figures |= interval_of_perplexity(torch.tensor(ratios).exp().tolist()).figures("ratio")
        same = [
            next((i for i, (a, b) in enumerate(zip(row["made"], other)) if a != b), len(other))
            for row in own
            for other in (first[row["prompt"]]["made"],)
        ]
        found.append(figures | interval(same).figures("same_tokens"))
    return found


def main() -> None:
    """Measure all models on all prompts; write the record after each prompt."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("models", nargs="+", metavar="NAME=FOLDER[@SPEC]", help="folders of transformers")
    add(
        "--text", type=Path, required=True, metavar="FILE", help="the text of the prompts, in UTF-8"
    )
    add("--length", type=int, default=2048, help="tokens of a prompt (default: 2048)")
    add("--prompts", type=int, default=10, help="number of prompts (default: 10)")
    add("--out", type=Path, required=True, metavar="FILE", help="the record")
    args = parser.parse_args()
    computing = ComputeOptions.choose("cpu", False, False)
    named = parse_models(args.models)
    open_model = cache(lambda model: load(model, computing, args.length + 256))
    facts = {"text": args.text.name, "length": args.length}
    facts |= {"torch": str(torch.__version__), "transformers": transformers.__version__}
    rows: list[Row] = []
    if args.out.exists():
        rows = json.loads(args.out.read_text(encoding="utf-8"))["figures"]["prompts"]
    done = {(row["model"], row["prompt"]) for row in rows}
    for number in range(args.prompts):
        for model in named:
            if (model.name, number) in done:
                continue
            opened = open_model(model)
            tokenizer = load_tokenizer(model.path)
            tokens = tokenize_text(args.text, model.path, opened)[1:]
            prompt = hide_keys(tokens, tokenizer, args.length, number, args.prompts)
            rows.append(
                {"model": model.name, "prompt": number} | measure(opened, tokenizer, prompt)
            )
            print({k: v for k, v in rows[-1].items() if k != "made"}, file=sys.stderr, flush=True)
            figures = {"models": summarise(rows), "prompts": rows}
            Record("prefill", figures, facts, command=own_command()).write(args.out)
    for row in summarise(rows):
        print(json.dumps(row))


if __name__ == "__main__":
    exit_on_error(main)
