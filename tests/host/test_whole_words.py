"""``--mask-whole-words`` masks whole words, in the programs and batches of fairseq."""

from __future__ import annotations

import json
import random
from argparse import Namespace

import pytest
import sentencepiece
import torch
from fairseq import tasks
from fairseq.data import encoders
from fairseq.data.encoders import gpt2_bpe_utils
from omegaconf import OmegaConf

from fairseq_posenc.errors import UserError
from fairseq_posenc.host.task_repairs import prepare_whole_words
from tests.helpers.commands import TRAINING, USER_DIR, new_directory, run

WORDS = ["abba", "cabbage", "dada", "bead", "fed", "egg"]


def _text(count):
    rng = random.Random(0)
    return [" ".join(rng.choices(WORDS, k=12)) for _ in range(count)]


def _write_gpt2(folder):
    """Write a BPE of single characters, the first of a word with its space; return the options."""
    space = gpt2_bpe_utils.bytes_to_unicode()[ord(" ")]
    pieces = [
        *gpt2_bpe_utils.bytes_to_unicode().values(),
        *(space + letter for letter in "abcdefg"),
    ]
    (folder / "encoder.json").write_text(json.dumps({piece: i for i, piece in enumerate(pieces)}))
    merges = ["#version: 0.2", *(f"{space} {letter}" for letter in "abcdefg"), ""]
    (folder / "vocab.bpe").write_text("\n".join(merges), encoding="utf-8")
    files = {
        "gpt2_encoder_json": str(folder / "encoder.json"),
        "gpt2_vocab_bpe": str(folder / "vocab.bpe"),
    }
    return {"_name": "gpt2", **files}


def _write_sentencepiece(folder):
    text = folder / "text"
    text.write_text("\n".join(_text(200)), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "pieces"), vocab_size=15, minloglevel=9
    )
    return {"_name": "sentencepiece", "sentencepiece_model": str(folder / "pieces.model")}


def _prepare(write):
    """Return a data-bin in pieces, and the options of the pieces."""
    folder = new_directory()
    options = write(folder)
    bpe = encoders.build_bpe(OmegaConf.create(options))
    for part, count in {"train": 16, "valid": 8}.items():
        lines = [bpe.encode(" " + line) for line in _text(count)]
        (folder / part).write_text("\n".join(lines) + "\n", encoding="utf-8")
    words = [item for part in ("train", "valid") for item in (f"--{part}pref", folder / part)]
    run("fairseq-preprocess", "--only-source", *words, "--destdir", folder / "bin")
    return folder / "bin", options


@pytest.mark.slow
@pytest.mark.parametrize("write", [_write_gpt2, _write_sentencepiece])
def test_a_training_masks_whole_words(write):
    data, options = _prepare(write)
    name, *files = options
    given = [item for file in files for item in (f"--{file.replace('_', '-')}", options[file])]
    log = run(
        "fairseq-train",
        *(data, "--user-dir", USER_DIR, "--task", "masked_lm", "--criterion", "masked_lm"),
        *("--arch", "roberta_m4m_tiny", "--mask-whole-words", "--tokens-per-sample", 128),
        *("--sample-break-mode", "eos", "--bpe", options[name], *given, *TRAINING),
        *("--max-epoch", 2, "--save-dir", data / "model"),
    ).log
    assert "done training" in log
    path = data / "model" / "checkpoint_last.pt"
    validated = run(
        "fairseq-validate",
        *(data, "--user-dir", USER_DIR, "--path", path, "--task", "masked_lm"),
        *("--batch-size", 16, "--required-batch-size-multiple", 1),
        *("--bpe", options[name], *given),
    )
    assert "valid" in validated.log
    _assert_whole(data, options)


def _assert_whole(data, options):
    """Assert that of each word all pieces are masked, or none; and that some are masked."""
    section = {
        **{"_name": "masked_lm", "data": str(data), "tokens_per_sample": 128, "seed": 1},
        **{"sample_break_mode": "eos", "mask_whole_words": True},
    }
    settings = OmegaConf.create({"task": section, "bpe": options})
    task = tasks.setup_task(settings.task)
    prepare_whole_words(task)
    task.load_dataset("train")
    begins = encoders.build_bpe(settings.bpe).is_beginning_of_word
    dictionary, masked_words = task.dictionary, 0
    plain = task._load_dataset_split("train", 1, False)
    for sample in (task.dataset("train")[i] for i in range(16)):
        target = sample["target"]
        # Sentences have 12 words each; the whole text says where a word begins.
        tokens = next(x for x in plain if _agrees(x, target, dictionary.pad()))
        words: list[list[bool]] = []
        for token, hit in zip(tokens.tolist(), target.ne(dictionary.pad()).tolist()):
            if token < dictionary.nspecial or begins(dictionary[token]):
                words.append([])
            words[-1].append(hit)
        assert all(len(set(word)) == 1 for word in words)
        masked_words += sum(word[0] and len(word) > 1 for word in words)
    assert masked_words > 5


def _agrees(tokens, target, pad):
    hit = target.ne(pad)
    return len(tokens) == len(target) and torch.equal(tokens[hit], target[hit])


@pytest.mark.parametrize("bpe", [None, "subword_nmt", "characters", {"_name": None}])
def test_pieces_must_show_where_words_begin(bpe):
    settings = OmegaConf.create({"task": {"mask_whole_words": True}, "bpe": bpe})
    for cfg in (settings.task, OmegaConf.create({"mask_whole_words": True})):
        with pytest.raises(UserError, match=r"one of .*gpt2"):
            prepare_whole_words(Namespace(cfg=cfg))


def test_a_task_without_the_option_is_left_alone():
    task = Namespace(cfg=Namespace(mask_whole_words=False))
    prepare_whole_words(task)
    assert not hasattr(task, "args")
