"""The probe: a task whose answer is wrong or always the same, and a loss of more than answers."""

import random
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from fairseq.data import Dictionary

import probe
from fairseq_posenc.errors import UserError
from fairseq_posenc.tasks.answers import ASKS, BLANK, ENDS, AnswersCriterion
from fairseq_posenc.workbench.experiments import variants
from probing.tasks import TASKS
from tests.helpers.commands import run
from tests.helpers.products import some_of
from tests.helpers.tiny_models import make_dictionary


def add(question: list[str]) -> list[str]:
    first, other = "".join(question).split("+")
    return list(str(int(first) + int(other)).zfill(len(first) + 1))


def halves(question: list[str]) -> tuple[list[str], list[str]]:
    """Return what is known, and what is asked of it."""
    end = question.index("?")
    return question[:end], question[end + 1 :]


def look_up_keys(question: list[str]) -> list[str]:
    words, asked = halves(question)
    return [dict(zip(words[::2], words[1::2]))[key] for key in asked]


def read_last_write(question: list[str]) -> list[str]:
    """What is read on the way must be right as well."""
    written = ""
    for instruction, bit in zip(question[::2], question[1::2]):
        assert instruction != "r" or bit == written
        written = bit if instruction == "w" else written
    assert question[-1] == "r"
    return [written]


def find_neighbor(question: list[str]) -> list[str]:
    words, (given, shift) = halves(question)
    assert len(set(words)) == len(words)
    return [word for i, word in enumerate(words) if i == words.index(given) + int(shift)]


def by_following(question: list[str]) -> list[str]:
    words, (value,) = halves(question)
    found: list[str] = []
    for name, is_assigned, source in zip(words, words[1:], words[2:]):
        if is_assigned == ":=" and source in (value, *found):
            found.append(name)
    return found


def say_last(known: dict[str, list[str]], words: list[str]) -> list[str]:
    """Return what is known of the last word; all answers before it must be right as well."""
    for key, asks, value, ends in zip(words, words[1:], words[2:], words[3:]):
        assert asks != ASKS or (known[key], ends) == ([value], ENDS)
    return known[words[-1]]


def by_reading_all(question: list[str]) -> list[str]:
    words, asked = halves(question)
    found: dict[str, list[str]] = {}
    for key, is_needle, value in zip(words, words[1:], words[2:]):
        if is_needle == "is":
            found.setdefault(key, []).append(value)
    assert asked[1::4] == [ASKS] * (len(asked) // 4)
    return say_last(found, asked)


def by_recalling(question: list[str]) -> list[str]:
    """The first words are the pairs; each of their keys is asked once."""
    asked = [key for key, asks in zip(question, question[1:]) if asks == ASKS] + question[-1:]
    pairs = question[: 2 * len(asked)]
    assert sorted(pairs[::2]) == sorted(asked)
    return say_last({key: [value] for key, value in zip(pairs[::2], pairs[1::2])}, question)


BRUTE_FORCE = {
    "addition": add,
    "bucket_sort": sorted,
    "copy": list,
    "cycle_navigation": lambda steps: [str((steps.count("right") - steps.count("left")) % 5)],
    "even_pairs": lambda bits: [str(1 - sum(a != b for a, b in pairwise(bits)) % 2)],
    "flip_flop": read_last_write,
    "indirect_indexing": find_neighbor,
    "look_up": lambda question: [question[int("".join(halves(question)[1]))]],
    "missing_duplicate": lambda words: [words[words.index("_") - len(words) // 2]],
    "modular_arithmetic": lambda question: [str(eval("".join(question)) % 5)],
    "mqar": by_recalling,
    "odds_first": lambda words: [*words[::2], *words[1::2]],
    "parity": lambda bits: [str(sum(map(int, bits)) % 2)],
    "recall": look_up_keys,
    "reverse": lambda letters: [*reversed(letters)],
    "sort": sorted,
    "variable_tracking": by_following,
    **{name: by_reading_all for name in TASKS if name.startswith("needle")},
}


@pytest.mark.parametrize("name", sorted(TASKS))
def test_answers_are_what_brute_force_finds(name):
    task, chance = TASKS[name], random.Random(5)
    for length in [*range(1, 41), 100, 200]:
        question, answer = task.make_example(chance, length)
        assert answer == BRUTE_FORCE[name](question)
        assert {*question, *answer} <= {*task.words, ASKS}
        assert ASKS not in task.words
        assert answer, "nothing to learn"
        asked_on_the_way = 3 * question.count(ASKS) + (length if name == "mqar" else 0)
        assert length <= 5 or abs(len(question) - length) <= 5 + asked_on_the_way

    answers = [tuple(task.make_example(chance, 20)[1]) for _ in range(200)]
    assert max(map(answers.count, answers)) < 140, "right by always saying the same"


def criterion(words: Dictionary, targets: list[str] | None = None):
    return AnswersCriterion(SimpleNamespace(target_dictionary=words, targets=targets))


WORDS = make_dictionary([ASKS, BLANK, ENDS, *"abc"])


def lines(*texts: str) -> torch.Tensor:
    numbers = [torch.tensor([WORDS.index(word) for word in text.split()]) for text in texts]
    return torch.nn.utils.rnn.pad_sequence(numbers, batch_first=True, padding_value=WORDS.pad())


def test_an_encoder_sees_blanks_in_place_of_answers():
    given = lines("</s> a = b ; c = b a", "</s> c = c")
    blanks = lines(f"</s> a = {BLANK} ; c = {BLANK} {BLANK}", f"</s> c = {BLANK}")

    def model(src_tokens):
        assert torch.equal(src_tokens, blanks)
        return (torch.zeros(*src_tokens.shape, len(WORDS)),)

    sample = {"net_input": {"src_tokens": given}, "target": given, "ntokens": 13}
    assert criterion(WORDS, ["self"])(model, sample)[1] == 4


def test_loss_and_exact_match_are_those_of_answers_alone():
    """The second answer is right but for its end; what is said of questions is all wrong."""
    questions = ("a = b ; c = b a", "c = c", "a = a")
    given = lines(*(f"</s> {question}" for question in questions))
    target = lines(*(f"{question} </s>" for question in questions))
    said = target.clone()
    said[:, 0] = WORDS.index("b")
    said[1, 3] = WORDS.index("a")
    scores = 3.0 * F.one_hot(said, len(WORDS)).float() + torch.rand(3, 9, len(WORDS))
    rows = [(0, 2), (0, 3), (0, 6), (0, 7), (0, 8), (1, 2), (1, 3), (2, 2), (2, 3)]
    terms = [-scores[row].log_softmax(-1)[target[row]] for row in rows]
    source = lines("a", "c", "a")  # of an encoder, which is not asked
    for inputs in ({"src_tokens": given}, {"src_tokens": source, "prev_output_tokens": given}):
        sample = {"net_input": inputs, "target": target, "ntokens": 10}
        loss, tokens, logged = criterion(WORDS)(lambda **_: (scores,), sample)
        torch.testing.assert_close(loss, torch.stack(terms).sum())
        assert (tokens, int(logged["exact"])) == (9, 2)


def test_a_dictionary_may_lack_the_sign_of_an_end_alone():
    for words, missing in (([], ASKS), ([ASKS], BLANK)):
        with pytest.raises(UserError, match=f"the dictionary has no '{missing}'"):
            criterion(make_dictionary(words), ["self"])
    without = make_dictionary([ASKS, *"ab"])
    given = torch.tensor([[without.unk(), without.index(ASKS), without.index("a")]])
    # An unknown word is no sign.
    assert criterion(without).mask_answers(given, given).tolist() == [[False, True, True]]


@pytest.mark.slow
@pytest.mark.parametrize("family", some_of(["causal-lm"], variants.FAMILIES))
def test_a_small_probe_learns_and_is_not_repeated(family, tmp_path):
    words = "--tasks flip_flop --encodings rope --seeds 1 --updates 80 --trained 5 --lengths 4,5,9"
    call = ["python", probe.__file__, *words.split(), "--family", family]
    fast = "--max-tokens 512 --max-tokens-valid 2048 --lr 0.005 --warmup-updates 20"
    call += ["--out", tmp_path / "probe", "--", *fast.split()]
    shares, again = (run(*call).out.splitlines()[-1] for _ in range(2))
    assert shares == again
    label, *values = shares.split()[-4:]
    assert label == "1:"
    assert float(values[0]) > 0.9
    (log,) = (tmp_path / "probe").rglob("train.log")
    assert log.read_text().count("$ fairseq-train") == 1
