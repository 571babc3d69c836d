"""Translating with trained models, and measuring them: the commands on a tiny language."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from fairseq import checkpoint_utils, tasks
from fairseq.data.data_utils import post_process
from fairseq.dataclass.configs import GenerationConfig
from omegaconf import OmegaConf

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.cli import main
from fairseq_posenc.workbench.results.record import read
from fairseq_posenc.workbench.translation import Translator
from fairseq_posenc.workbench.translation.scores import compare
from tests.helpers.commands import (
    USER_DIR,
    call,
    kill_command,
    made_once,
    new_directory,
    refused,
    run,
    script,
    trained,
)
from tests.helpers.products import some_of

slow = pytest.mark.slow
# A word of the source is a word of the target; the order stays.
FRENCH, ENGLISH = "le chat noir boit du lait et dort", "the cat black drinks some milk and sleeps"
WORDS = dict(zip(FRENCH.split(), ENGLISH.split()))
LONGEST = 40  # positions of the models
TEST = 12


def _sentences(count: int, seed: int) -> list[list[str]]:
    rng = random.Random(seed)
    return [rng.choices(list(WORDS), k=rng.randint(2, 8)) for _ in range(count)]


@made_once
def raw() -> Path:
    """Return a folder of parallel text."""
    folder = new_directory()
    for number, (name, count) in enumerate({"train": 200, "valid": 4, "test": TEST}.items()):
        sentences = _sentences(count, number)
        source = "".join(f"{' '.join(words)}.\n" for words in sentences)
        target = "".join(f"{' '.join(WORDS[word] for word in words)}.\n" for words in sentences)
        (folder / f"{name}.fr").write_text(source, encoding="utf-8")
        (folder / f"{name}.en").write_text(target, encoding="utf-8")
    return folder


@made_once
def data() -> Path:
    """Return the data-bin of the text."""
    out = new_directory() / "bin"
    sets = [part for name in ("train", "valid", "test") for part in (f"--{name}", raw() / name)]
    languages = ["--source-lang", "fr", "--target-lang", "en"]
    words = ["preprocess", "translation", "files", *sets, *languages, "--vocab-size", 72]
    assert main([*map(str, words), "--out", str(out)]) == 0
    return out


@made_once
def model() -> Path:
    """Return the checkpoints of a model that has learned a little of the language.

    Their folder has a name as `train` gives it, with a comma.
    """
    save_dir = new_directory() / "rope,lr=5e-3"
    run(
        "fairseq-train",
        data(),
        *("--user-dir", USER_DIR, "--arch", "transformer_rope_tiny", "--cpu", "--num-workers", 0),
        *("--share-all-embeddings", "--dropout", 0, "--max-tokens", 300),
        *("--max-source-positions", LONGEST, "--max-target-positions", LONGEST),
        *("--optimizer", "adam", "--lr", 0.005, "--max-epoch", 12, "--save-interval", 4),
        *("--disable-validation", "--save-dir", save_dir),
    )
    return save_dir


def checkpoint() -> Path:
    return model() / "checkpoint_last.pt"


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


@pytest.fixture(scope="module")
def translator():
    return Translator.load(checkpoint())


def untrained(spec: str, path: Path, **options: object) -> Path:
    """Write a checkpoint with other positions, or options."""
    state = torch.load(checkpoint())
    vars(state["cfg"]["model"]).update(options, position_encoding=spec)
    built = tasks.setup_task(_config(state).task).build_model(_config(state).model)
    torch.save({**state, "model": built.state_dict()}, path)
    return path


def _config(state):
    return OmegaConf.create(state["cfg"], flags={"allow_objects": True})


@slow
def test_order_and_empty_lines_are_kept(translator):
    sources = lines(raw() / "test.fr")
    found = translator.translate(["", sources[0], "  \t ", *sources[1:], ""], beam=2, nbest=2)
    assert [len(hypotheses) for hypotheses in found] == [1, 2, 1, *[2] * (TEST - 1), 1]
    for number in (0, 2, -1):
        assert found[number] == [("", 0.0)]
    texts = [hypotheses[0].text for hypotheses in found if hypotheses[0].text]
    assert texts == [best.text for (best,) in translator.translate(sources, beam=2)]
    assert translator.translate([]) == []
    assert translator.translate([""]) == [[("", 0.0)]]
    for numbers in ((0, 0), (1, 2), (1, 1, 1e308), (1, 1, math.nan)):
        with pytest.raises(UserError, match="give nbest from 1 to beam, and a penalty from -10"):
            translator.translate(sources, *numbers)


@slow
def test_one_sentence_and_many_are_translated_alike(translator):
    sources = lines(raw() / "test.fr")
    for source, together in zip(sources, translator.translate(sources, beam=3, nbest=3)):
        (alone,) = translator.translate([source], beam=3, nbest=3)
        assert [each.text for each in alone] == [each.text for each in together]
        scores = [each.score for each in together]
        assert [each.score for each in alone] == pytest.approx(scores, rel=1e-4)
        assert scores == sorted(scores, reverse=True)


def greedy_without_cache(logits, prefix, dictionary, most):
    """Return the most probable symbols one by one, each from a whole pass, and their mean score."""
    symbols, scores = list(prefix), []
    while len(scores) <= most and dictionary.eos() not in symbols[len(prefix) :]:
        log_probs = logits(torch.tensor([symbols]))[0, -1].log_softmax(-1)
        log_probs[dictionary.pad()] = -math.inf
        if len(symbols) == 1:
            log_probs[dictionary.eos()] = -math.inf  # fairseq's translations have a word at least
        if len(scores) == most:
            log_probs[: dictionary.eos()] = log_probs[dictionary.eos() + 1 :] = -math.inf
        symbols.append(int(log_probs.argmax()))
        scores.append(float(log_probs[symbols[-1]]))
    return symbols[len(prefix) :], sum(scores) / len(scores)


@slow
@torch.no_grad()
def test_beam_1_is_the_greedy_search_without_a_cache(translator):
    (network,) = translator.interface.models
    dictionary = translator.interface.tgt_dict
    sources = lines(raw() / "test.fr")
    for source, (ours,) in zip(sources, translator.translate(sources, beam=1)):
        tokens = translator.encode(source)[None]
        encoded = network.encoder(tokens, torch.tensor([tokens.size(1)]))
        symbols, score = greedy_without_cache(
            lambda prefix, encoded=encoded: network.decoder(prefix, encoder_out=encoded)[0],
            [dictionary.eos()],
            dictionary,
            LONGEST - 1,
        )
        assert ours.text == post_process(dictionary.string(symbols), "sentencepiece")
        assert ours.score == pytest.approx(score, rel=1e-4)


@slow
@torch.no_grad()
def test_a_causal_lm_continues_a_batch_as_each_text_alone_without_a_cache():
    path = trained("causal_lm").save_dir / "checkpoint_last.pt"
    (network,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(path)])
    generator = task.build_generator([network], GenerationConfig(beam=1, max_len_b=12))
    dictionary = task.target_dictionary
    texts = [[2, 4, 9, 5], [2, 6, 20, 7], [2, 11, 4, 4]]
    batch = {"net_input": {"src_tokens": torch.tensor(texts), "src_lengths": torch.tensor([4] * 3)}}
    for text, (ours,) in zip(texts, task.inference_step(generator, [network], batch)):
        most = 12 - len(text) + 1
        symbols, _ = greedy_without_cache(lambda x: network(x)[0], text, dictionary, most)
        assert ours["tokens"].tolist() == text[1:] + symbols


@slow
@pytest.mark.parametrize("spec", some_of(["rope", "m4m"], ["rope", "alibi", "m4m", "sinusoidal"]))
def test_a_source_longer_than_any_in_training(spec, tmp_path):
    translator = Translator.load(untrained(spec, tmp_path / "model.pt"))
    ((found,),) = translator.translate([" ".join(["chat"] * 2 * LONGEST)], beam=1)
    assert found.text
    assert math.isfinite(found.score)


@slow
@pytest.mark.parametrize("options", [{}, {"_name": "transformer", "encoder_learned_pos": True}])
def test_a_source_longer_than_learned_positions_is_refused_in_one_line(options, tmp_path, capsys):
    path = untrained("learned", tmp_path / "model.pt", **options)
    long = "dort " * 2 * LONGEST
    message = refused(capsys, "translate", "--checkpoint", path, "chat noir", long)
    assert message.startswith(f"'{long[:40]}...': a sequence of ")
    assert f"is longer than the {LONGEST} positions of 'learned'" in message


@slow
def test_translate_shows_the_greedy_and_the_best_hypotheses(translator, capsys):
    source = " ".join(lines(raw() / "test.fr")[:1] * 60)
    out, err = call(capsys, "translate", "--checkpoint", checkpoint(), "--beam", 2, source)
    assert "sentences longer than a translation may be (200 tokens): 1; split" in err
    shown, greedy, *best = out.splitlines()
    expected = translator.translate([source], beam=1)[0] + translator.translate([source], 2, 2)[0]
    assert shown == source
    labels = ["greedy   ", "beam 2, 1", "beam 2, 2"]
    for line, label, hypothesis in zip([greedy, *best], labels, expected):
        assert line == f"  {label}  {hypothesis.score:8.4f}  {hypothesis.text}"


@slow
def test_translate_answers_each_line_of_a_pipe_before_the_next(translator):
    words = [script("fairseq-posenc"), "translate", "--checkpoint", checkpoint(), "--plain"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, **pipes) as process:
        for source in ["le chat dort.", "", "le lait noir."]:
            process.stdin.write(f"{source}\n")
            process.stdin.flush()
            ((best,),) = translator.translate([source])
            assert process.stdout.readline() == f"{best.text}\n"
        process.stdin.write("et boit")  # no end of line
        process.stdin.close()
        ((best,),) = translator.translate(["et boit"])
        assert process.stdout.read() == f"{best.text}\n"
    assert process.returncode == 0


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """Evaluate two trainings of a model with beam 3, and two that are less trained."""
    out = tmp_path_factory.mktemp("bleu") / "out"
    last, middle, first = (model() / f"checkpoint{epoch}.pt" for epoch in (12, 8, 4))
    systems = [f"rope={last},{middle}", f"worse={middle},{first}"]
    assert main(["bleu", *systems, "--beam", "3", "--out", str(out)]) == 0
    return out


@slow
def test_the_scores_are_those_of_sacrebleus_command(evaluated):
    found = read(evaluated / "bleu.json")
    described = [(row["system"], row["training"], row["beam"]) for row in found.figures["scores"]]
    assert described == [(name, n, 3) for name in ("rope", "worse") for n in (1, 2)]
    options = ["-m", "bleu", "chrf", "-w", 10, "-f", "json"]
    for row in found.figures["scores"][1:3]:  # of each system; a wrong order would swap these
        texts = data() / "test.raw.en", "-i", evaluated / row["system"] / f"{row['training']}.txt"
        for theirs in json.loads(run("sacrebleu", *texts, *options).out):
            assert row[theirs["name"]] == pytest.approx(theirs["score"], abs=1e-9)
            assert 0 < row[theirs["name"]] < 100
            for word in theirs["signature"].split("|"):
                assert word in found.data[f"signature of {theirs['name']}"].split("|")
    report = (evaluated / "bleu.md").read_text(encoding="utf-8")
    row = found.figures["scores"][1]
    assert f"| `rope` | 2 | {row['BLEU']:.2f} | {row['chrF2']:.2f} |" in report
    assert "tok:13a|smooth:exp|version:" in report


@slow
def test_the_translations_are_those_of_fairseq_generate(evaluated, translator):
    options = ["--user-dir", USER_DIR, "--path", checkpoint(), "--remove-bpe", "sentencepiece"]
    options += ["--beam", 3, "--cpu", "--batch-size", 5, "--required-batch-size-multiple", 1]
    done = run("fairseq-generate", data(), *options)
    parts = [line.split("\t") for line in done.out.splitlines() if line.startswith("D-")]
    theirs = {int(name[2:]): (float(score), text) for name, score, text in parts}
    assert sorted(theirs) == list(range(TEST))
    assert lines(evaluated / "rope" / "1.txt") == [theirs[n][1] for n in range(TEST)]
    for number, (ours,) in enumerate(translator.translate(lines(data() / "test.raw.fr"), beam=3)):
        assert ours.score / math.log(2) == pytest.approx(theirs[number][0], rel=1e-4)


def noisy(references: list[str], share: float, seed: int) -> list[str]:
    """Drop a share of the words."""
    rng = random.Random(seed)
    return [" ".join(word for word in line.split() if rng.random() > share) for line in references]


@slow
@pytest.mark.parametrize(
    ("trainings", "option", "count"), [(1, "--paired-bs", 100), (3, "--paired-ar", 60)]
)
def test_the_differences_are_those_of_sacrebleus_paired_tests(trainings, option, count, tmp_path):
    """Over sentences, or over trainings and sentences: then all trainings are one test set."""
    references = [" ".join(words) for words in _sentences(count, 5)]
    systems = {
        name: [noisy(references, share, first + seed) for seed in range(trainings)]
        for name, share, first in (("a", 0.2, 0), ("b", 0.22, 10))
    }
    found, signatures = compare(references, systems)
    assert [(row["system"], row["metric"]) for row in found] == [("b", "BLEU"), ("b", "chrF2")]
    for name, texts in {"ref": [references] * trainings, **systems}.items():
        (tmp_path / name).write_text("\n".join("\n".join(text) for text in texts))
    options = [option, "-m", "bleu", "chrf", "-w", 6, "-f", "text", "--no-color"]
    theirs = run("sacrebleu", "ref", "-i", "a", "b", *options, cwd=tmp_path).out
    p_values = [float(value) for value in re.findall(r"\(p = ([0-9.]+)\)", theirs)]
    assert [round(row["p_value"], 4) for row in found] == p_values
    assert all(0.001 < value < 0.9 for value in p_values)
    assert all(signature in theirs for signature in signatures.values())


@pytest.mark.parametrize("trainings", [1, 2])
def test_what_scores_the_same_is_no_difference_and_a_few_lines_are_chance(trainings):
    """The same, more white space, or nothing learned; then none and all of three exchanges."""
    lines = ["one two three four", "five six seven eight"]
    for a, b in ((lines, lines), (lines, [f"{line} " for line in lines]), (["z"] * 2, [""] * 2)):
        found, _ = compare(lines, {"a": [a] * trainings, "b": [b] * trainings})
        assert [(row["difference"], row["p_value"]) for row in found] == [(0, None)] * 2
    found, _ = compare(lines, {"a": [lines, lines], "b": [["", ""], ["", lines[1]]]})
    assert [(row["p_value"], row["least_p_value"]) for row in found] == [(2 / 2**3, 2 / 2**3)] * 2
    found, _ = compare(lines[:1], {"a": [lines[:1]], "b": [["one two"]]})
    assert [row["p_value"] for row in found] == [1] * 2  # the bootstrap draws the same line always


@slow
def test_trainings_have_means_and_the_lengths_count_every_sentence_once(evaluated):
    record = read(evaluated / "bleu.json")
    rows = record.figures["scores"]
    for mean in record.figures["means"]:
        values = [row["BLEU"] for row in rows if row["system"] == mean["system"]]
        assert (mean["BLEU"], mean["trainings"]) == (sum(values) / 2, 2)
        assert mean["BLEU_low"] is mean["BLEU_high"] is None  # two trainings are not judged
    sources = [len(line.split()) for line in lines(data() / "test.raw.fr")]
    short = sum(count <= 5 for count in sources)
    counts = {row["words"]: row["sentences"] for row in record.figures["lengths"]}
    assert counts == {"1-5": short, "6-10": TEST - short}
    assert 0 < short < TEST
    report = (evaluated / "bleu.md").read_text(encoding="utf-8")
    assert f"| `rope` | mean of 2 | {record.figures['means'][0]['BLEU']:.2f} |" in report
    assert "Clark et al. 2011" in report


@slow
def test_a_killed_evaluation_goes_on_with_the_next_training(evaluated, tmp_path, capsys):
    out = tmp_path / "out"
    last, middle = (model() / f"checkpoint{epoch}.pt" for epoch in (12, 8))
    command = ["bleu", f"rope={last},{middle}", "--beam", "3", "--out", str(out)]
    first = out / "rope" / "1.json"
    kill_command(command, first.exists, out)
    (out / "rope" / "2.json").unlink(missing_ok=True)  # if the machine was slow to kill
    before = first.stat().st_mtime_ns
    said = [line for line in call(capsys, *command)[1].splitlines() if "sentences" in line]
    assert said == ["rope, checkpoint 2: 12 sentences"]
    assert first.stat().st_mtime_ns == before
    for name in ("1.txt", "2.txt"):
        assert lines(out / "rope" / name) == lines(evaluated / "rope" / name)
    message = refused(capsys, *command, "--lenpen", "2")
    assert message.startswith(f"{first}: was made with other search: [3, 1.0], not [3, 2.0]")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("translate --checkpoint no.pt x", "--checkpoint no.pt: no such file"),
        ("translate --checkpoint no.pt --beam 0 x", "argument --beam: must be a whole number"),
        ("bleu b.pt", "cannot read 'b.pt': write NAME=PATH or NAME=PATH,PATH"),
        ("bleu a=b.pt a=c.pt", "'a': each value needs its own name"),
        ("bleu a=b,c d=e", "name the same number of checkpoints for each system: a"),
        ("bleu a/b=c.pt", "'a/b': each value needs its own name, which a folder can"),
        ("bleu a=b.pt --fp16", "--fp16 is for GPUs"),
        ("bleu a=b.pt --lenpen nan", "argument --lenpen: must be a number from -10 to 10, not 'n"),
        ("translate --checkpoint no.pt --lenpen 1e308 x", "argument --lenpen: must be a n"),
        ("bleu rope=missing.pt", "rope: missing.pt: no such file"),
        ("bleu rope=no.pt,b.pt", "rope, checkpoint 1: no.pt: no such file"),
    ],
)
def test_what_makes_no_sense_is_refused(command, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refused(capsys, *command.split()).startswith(message)


@slow
def test_texts_of_other_lengths_or_without_text_are_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, content in {"short": b"a b\n", "empty": b"", "bytes": b"a\nb\xff\n"}.items():
        Path(name).write_bytes(content)
    bleu = ["bleu", f"rope={checkpoint()}"]
    message = refused(capsys, *bleu, "--reference", "short")
    assert message == f"{data()}/test.raw.fr has 12 sentences, but short has 1"
    assert "--source empty: the file is empty" in refused(capsys, *bleu, "--source", "empty")
    message = refused(capsys, *bleu, "--reference", "bytes")
    assert message.startswith("--reference bytes, line 2: byte 0xff is not UTF-8")
    message = refused(capsys, *bleu, "--split", "other")
    assert message.startswith(f"--split other: {data()}/other.raw.fr: cannot be read")


@slow
def test_a_checkpoint_of_another_task_is_refused(capsys):
    path = trained("causal_lm").save_dir / "checkpoint_last.pt"
    message = refused(capsys, "translate", "--checkpoint", path, "x")
    assert message.startswith(f"--checkpoint {path}: is a model for the task 'language_modeling'")


@slow
def test_a_data_folder_that_does_not_fit_is_refused(capsys, tmp_path):
    copy = tmp_path / "bin"
    shutil.copytree(data(), copy)
    command = ["translate", "--checkpoint", checkpoint(), "x", "--data"]
    assert "no such folder" in refused(capsys, *command, tmp_path / "no")
    (copy / "sentencepiece.model").unlink()
    message = refused(capsys, *command, copy)
    assert "holds neither sentencepiece.fr.model nor sentencepiece.model" in message


@slow
def test_a_folder_is_no_checkpoint(capsys):
    message = refused(capsys, "bleu", f"rope={model()}")
    assert message.startswith(f"rope: {model()}: a folder; name a checkpoint in it, such as ")


@slow
def test_models_are_used_together_only_for_the_same_languages(capsys, tmp_path):
    state = torch.load(checkpoint())
    state["cfg"]["task"] |= {"source_lang": "en", "target_lang": "fr"}
    back = tmp_path / "back.pt"
    torch.save(state, back)
    message = refused(capsys, "bleu", f"a={checkpoint()}", f"b={back}")
    assert message == "the systems are for different languages; evaluate them separately"
