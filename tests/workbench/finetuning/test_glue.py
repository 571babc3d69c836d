"""GLUE but for training: a text, metric or setting unlike its source, a mean of wrong runs."""

import itertools
import json
import math
from types import SimpleNamespace

import pytest
import torch
from fairseq.dataclass.configs import CommonConfig
from fairseq.tasks.sentence_prediction import SentencePredictionConfig, SentencePredictionTask
from fairseq.trainer import Trainer
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from scipy import stats
from sentencepiece import SentencePieceProcessor
from sklearn import metrics as theirs

from fairseq_posenc.checkpoints.dictionary import MANIFEST
from fairseq_posenc.errors import UserError
from fairseq_posenc.folders import REQUEST
from fairseq_posenc.tasks.glue import metrics
from fairseq_posenc.tasks.glue.data import find_training_data, open_glue_data
from fairseq_posenc.tasks.glue.definitions import TASKS
from fairseq_posenc.tasks.glue.task import GlueTask, GlueTaskConfig
from fairseq_posenc.workbench.finetuning import recipes
from fairseq_posenc.workbench.finetuning.glue import report
from fairseq_posenc.workbench.finetuning.glue.runs import CONFIGS, list_runs
from fairseq_posenc.workbench.finetuning.glue.worker import has_collapsed, measure
from glue import find_file, read_examples, truncate_lengths
from tests.helpers.glue_files import HEADERS, train_pieces, write_task
from tests.helpers.preprocess import DATA, published, start

SIZES = {"train": 9, "valid": 5, "test": 4, "valid1": 3, "test1": 6, "test2": 7}
PAIR = "sentence1,sentence2,"  # columns
HALF = SimpleNamespace(cfg=SimpleNamespace(common=SimpleNamespace(fp16=True, bf16=False)))


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    return train_pieces(tmp_path_factory.mktemp("pieces"))


def rows(folder, task, split, text):
    path = folder / "a.tsv"
    path.write_text(text.replace(",", "\t"))
    read_examples(path, TASKS[task], split)


def preprocess(folder, tasks, *tokens):
    tokens = tokens or ["--sentencepiece-model", train_pieces(folder)]
    start("glue", folder, "--out", folder / "bin", "--tasks", tasks, *tokens)


def find_data(folder, splits):
    """Find the data-bin of a manifest with splits, or without one, or none."""
    if splits != "nothing":
        (folder / "RTE").mkdir()
    if not isinstance(splits, str):
        (folder / "RTE" / MANIFEST).write_text(json.dumps({"glue_task": "RTE", "splits": splits}))
    find_training_data(folder, TASKS["RTE"])


def compose(_, change):
    recipes.compose_recipe(CONFIGS / "m4m_rte.yaml", 10, [change])


@pytest.mark.parametrize(
    ("call", "given", "message"),
    [
        (rows, ["SST-2", "train", "sentence,label\na"], "a.tsv, line 2: 1 column instead of 2; "),
        (rows, ["QQP", "test", "id,question1,question2\na"], "1 column instead of 3; fix the file"),
        (rows, ["SST-2", "valid", "sentence,label\na,2"], "a.tsv, line 2: the label '2' is not"),
        (rows, ["RTE", "valid", PAIR + "label\na,b,2"], "'2' is not one of entailment, not_entail"),
        (rows, ["STS-B", "valid", PAIR + "score\na,b,5.1"], "a.tsv, line 2: the score '5.1' is"),
        (rows, ["STS-B", "valid", PAIR + "score\na,b,-1"], "'-1' is not between 0 and 5; fix the"),
        (rows, ["STS-B", "valid", PAIR + "score\na,b,nan"], "the score 'nan' is not between 0 and"),
        (rows, ["SST-2", "train", "sentence,x\na,1"], r"a.tsv, line 1: .*'label' \(sentence, x\)"),
        (preprocess, ["RTE", "--encoder-json", "e", "--vocab-bpe", "v"], "give --dict: the dict"),
        (preprocess, ["WNLI"], "--tasks WNLI: unknown task 'WNLI': choose MNLI"),
        (preprocess, ["RTE,RTE"], "--tasks RTE,RTE: a task is named"),
        (preprocess, ["QQP"], "QQP/train.tsv does not exist, nor with .gz"),
        (find_data, ["nothing"], "RTE does not exist: make it .* preprocess glue --ta"),
        (find_data, [""], "RTE is not a data-bin of a GLUE task: it has no"),
        (find_data, [{}], "describes no GLUE task .*; make it with fairseq-posenc"),
        (find_data, [{"train": {"examples": 9}}], "describes no GLUE task"),
        (find_data, [{"train": 9}], "describes no GLUE task"),
        (find_data, [{"valid": {"examples": 9, "longest": 9}}], "RTE has no train set: make it"),
        (compose, ["model.drop=1"], "m4m_rte.yaml: Could not override 'model.drop'"),
        (compose, ["task.seeds=[x]"], "m4m_rte.yaml: .*'x'.* Integer"),
        (compose, ["task.warmup_ratio=x"], "m4m_rte.yaml: .*'x'.* Float"),
        (compose, ["dataset.max_tokens=4000"], "--set dataset.max_tokens the number of updates"),
        (compose, ["optimization.lr=["], "m4m_rte.yaml: "),
        (compose, ["dataset.batch_size=0"], "without dataset.batch_size"),
        (compose, ["dataset.batch_size=null"], "without dataset.batch_size the number of updates"),
    ],
)
def test_bad_input_is_one_line(tmp_path, call, given, message):
    with pytest.raises(UserError, match=message) as refusal:
        call(tmp_path, *given)
    assert "\n" not in str(refusal.value)


def test_the_longer_sentence_is_cut_first():
    for room, *pair in itertools.product(range(14), range(12), range(12)):
        first, second = pair
        while first + second > room:
            first, second = (first - 1, second) if first > second else (first, second - 1)
        assert truncate_lengths(pair, room) == [first, second]
    assert (truncate_lengths([3], 5), truncate_lengths([9], 5)) == ([3], [5])


@pytest.mark.parametrize("name", TASKS)
def test_fairseqs_own_task_reads_the_texts_and_labels_of_every_file(tmp_path, name, pieces, capsys):
    task = TASKS[name]
    written = write_task(tmp_path / "raw", name, SIZES)
    columns = HEADERS[name][0].split(",")  # the first sentence is the first in the file
    assert task.sentences == tuple(column for column in columns if column in task.sentences)
    common = [tmp_path / "raw", "--sentencepiece-model", pieces, "--tasks", name, "--out"]
    start("glue", *common, tmp_path / "bin")
    capsys.readouterr()
    start("glue", *common, tmp_path / "bin")
    assert capsys.readouterr().err.startswith(f"{tmp_path}/bin/{name} exists already")
    data = find_training_data(tmp_path / "bin", task)
    given = {"data": str(data.path), "seed": 1}
    settings = GlueTaskConfig(**given, max_positions=data.longest)
    theirs = SentencePredictionConfig(
        **given,
        num_classes=len(task.classes) or 1,
        init_token=0,
        separator_token=2,
        regression_target=task.regression,
    )
    readers = [SentencePredictionTask.setup_task(theirs), GlueTask.setup_task(settings)]
    processor = SentencePieceProcessor(model_file=str(pieces))

    def cut(text):
        return [readers[0].dictionary.index(x) for x in processor.encode(text, out_type=str)]

    first = [*cut("the tree"), 2, 2] if len(task.sentences) > 1 else []  # <s> A </s> </s> B </s>
    for split in task.files:
        found = read_examples(find_file(tmp_path / "raw", task, split), task, split)
        assert found.sentences[-1] == [text for text, _ in written[split]]
        assert found.broken == (name == "QQP" and split not in task.test_splits)
        for reader in readers:
            dataset = reader.load_dataset(split)
            assert len(dataset) == SIZES[split] == data.splits[split]["examples"]
            assert max(dataset.sizes[0]) == data.splits[split]["longest"]
            for example in dataset:
                text, label = written[split][example["id"]]
                assert example["net_input.src_tokens"].tolist() == [0, *first, *cut(text), 2]
                if split not in task.test_splits:
                    target = task.classes.index(label) if task.classes else float(label) / 5
                    assert [*example["target"]] == pytest.approx([target])
        if split in task.test_splits:
            assert found.labels == []
            assert data.test_ids(split) == [*map(str, range(SIZES[split]))]
        elif task.regression:  # half precision does not round the scores of a batch
            batch = Trainer._fp_convert_sample(HALF, dataset.collater([dataset[0], dataset[1]]))
            exact = [float(label) / 5 for _, label in written[split][:2]]
            assert batch["target"].flatten().tolist() == pytest.approx(exact, rel=1e-6)
            assert batch["dataset_size"] == len(dataset)
    # Long ones are cut and counted.
    limit = data.splits["train"]["longest"] - 1
    start("glue", *common, tmp_path / "cut", "--max-tokens", limit)
    shorter = open_glue_data(tmp_path / "cut" / name)
    assert shorter.splits["train"]["longest"] == limit
    assert 0 == data.splits["train"]["cut"] < shorter.splits["train"]["cut"] < SIZES["train"]
    manifest = json.loads((shorter.path / MANIFEST).read_text())
    assert manifest["plan"]["options"] == {"max_tokens": limit}
    settings.max_positions = limit
    advice = f"the model takes {limit}: make it with --max-tokens {limit}"
    with pytest.raises(UserError, match=f"of {data.longest} tokens and {advice}"):
        GlueTask.setup_task(settings)


def test_what_glues_site_wants_beside_the_eight(tmp_path, pieces):
    """The diagnostic set for MNLI's model, which may be missing, and WNLI's majority class."""
    raw, submission = tmp_path / "raw", tmp_path / "submission"
    for name in TASKS:
        write_task(raw, name, {split: 3 for split in TASKS[name].files if split != "test2"})
    start("glue", raw, "--out", tmp_path / "eight", "--sentencepiece-model", pieces)
    assert "test2" not in open_glue_data(tmp_path / "eight" / "MNLI").splits
    assert not (tmp_path / "eight" / "WNLI.tsv").exists()
    write_task(raw, "MNLI", SIZES)
    labels = [label for _, label in write_task(raw, "WNLI", SIZES)["train"]]
    start("glue", raw, "--out", tmp_path / "all", "--sentencepiece-model", pieces)
    assert open_glue_data(tmp_path / "all" / "MNLI").splits["test2"]["examples"] == 7
    expected = "".join(f"{number}\t{max(labels, key=labels.count)}\n" for number in range(4))
    assert (tmp_path / "all" / "WNLI.tsv").read_text() == "index\tprediction\n" + expected
    missing = ["AX", "CoLA", "MNLI-m", "MNLI-mm", "MRPC", "QNLI", "QQP", "RTE", "SST-2", "STS-B"]
    for folder in ("all", "eight"):  # what one has added stays
        assert report.complete_submission(submission, tmp_path / folder) == missing
        assert [path.name for path in submission.iterdir()] == ["WNLI.tsv"]
    (submission / "RTE.tsv").write_text("of a run that is gone")
    pretrained = SimpleNamespace(path=tmp_path / "x.pt", spec="m4m", model_options={})
    report.write_results([], tmp_path, pretrained, "m4m")
    assert [path.name for path in submission.iterdir()] == ["WNLI.tsv"]
    (folder := tmp_path / "RTE" / "lr1-seed1").mkdir(parents=True)
    (folder / REQUEST).write_text('{"task": "RTE"}')
    with pytest.raises(UserError, match="lr1-seed1: is a run of another version; delete that"):
        list_runs(tmp_path)


# Examples of the published files: train (0 is unknown), valid and test.
PUBLISHED = {"CoLA": (8551, 1043, 1063), "SST-2": (67349, 872, 1821), "RTE": (2490, 277, 3000)}
PUBLISHED |= {"MRPC": (3668, 408, 1725), "STS-B": (5749, 1500, 1379), "QNLI": (0, 5463, 5463)}


@published
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_files_have_their_published_counts(name):
    for split, expected in zip(("train", "valid", "test"), PUBLISHED[name]):
        if expected:
            path = find_file(DATA / "glue_data", TASKS[name], split)
            found = read_examples(path, TASKS[name], split)
            assert (len(found.ids), found.broken) == (expected, 0)


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("one_class", [False, True])
def test_classification_equals_scikit_learn(classes, one_class):
    labels, guessed = torch.randint(classes, (2, 50))
    found = torch.where(torch.rand(50) < 0.6, labels, guessed)
    if one_class:
        found = torch.zeros(50)  # a model of one class alone has no correlation and no F1
    counts = metrics.confusion(found, labels, classes)
    assert counts.tolist() == theirs.confusion_matrix(labels, found).tolist()
    expected = {"accuracy": theirs.accuracy_score(labels, found)}
    if classes == 2:
        expected |= {"f1": theirs.f1_score(labels, found)}
        expected |= {"matthews": theirs.matthews_corrcoef(labels, found)}
    assert metrics.classification(counts) == pytest.approx({k: 100 * expected[k] for k in expected})
    assert metrics.matthews(counts) == pytest.approx(100 * theirs.matthews_corrcoef(labels, found))


def test_correlations_of_scores_with_ties_equal_scipy():
    first, second = torch.randn(2, 80).double()
    first, second = first.round(decimals=1), (first + second).round(decimals=1)
    assert len(first.unique()) < 50  # of 80
    ours = metrics.regression(first, second)
    assert set(metrics.regression(first[:0], second[:0]).values()) == {0.0}  # no scores
    assert ours["pearson"] == pytest.approx(100 * stats.pearsonr(first, second)[0])
    assert ours["spearman"] == pytest.approx(100 * stats.spearmanr(first, second)[0])


@pytest.mark.parametrize(
    ("task", "outputs", "collapsed"),
    [
        *(("STS-B", [[value]] * 4, True) for value in (0.3, math.nan, math.inf)),
        ("STS-B", [[0.1], [0.2], [0.3], [0.5]], False),
        ("MRPC", [[0, 1]] * 4, True),
        ("MRPC", [[1, 0], [0, 1]] * 2, True),  # at chance
        ("MRPC", [[1, 0]] * 3 + [[0, 1]], False),
        ("MNLI", [[1, 0, 0], [0, 0, 1]] * 2, False),  # at chance, which is not known of three
        ("MNLI", [[1, 0, 0]] * 4, True),
    ],
)
def test_a_run_that_says_one_thing_or_is_at_chance_has_collapsed(task, outputs, collapsed):
    outputs, labels = torch.tensor(outputs).float(), torch.tensor([0, 0, 1, 1])
    figures = measure(TASKS[task], outputs, labels)
    assert has_collapsed(TASKS[task], outputs, figures) is collapsed
    if task == "STS-B" and collapsed:
        assert figures == {"pearson": 0.0, "spearman": 0.0}


def test_predictions_are_labels_and_scores_as_glue_wants_them():
    two, scores = torch.eye(2).flip(0), torch.tensor([[-0.1], [0.52], [1.2]])
    assert report.format_predictions(TASKS["RTE"], two) == ["not_entailment", "entailment"]
    assert report.format_predictions(TASKS["QQP"], two) == ["1", "0"]
    assert report.format_predictions(TASKS["STS-B"], scores) == ["0.000", "2.600", "5.000"]


# DecBERT's table 8: learning rates, batch, warm-up, updates.
DECBERT = {
    "MNLI": ([1e-5], 32, 7432, 123_873),
    "QNLI": ([1e-5], 32, 1986, 33_112),
    "QQP": ([1e-5], 32, 28_318, 113_272),
    "RTE": ([2e-5], 16, 122, 2036),
    "SST-2": ([1e-5], 32, 1256, 20_935),
    "MRPC": ([1e-5, 2e-5], 16, 137, 2296),
    "STS-B": ([2e-5], 16, 214, 3598),
    "CoLA": ([1e-5], 16, 320, 5336),
}
METRICS = {"STS-B": "spearman", "CoLA": "matthews"}


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("protocol", ["m4m", "decbert"])
def test_the_yaml_files_have_the_settings_of_the_papers(protocol, name):
    if protocol == "decbert":
        rates, batch, warmup, updates = DECBERT[name]
        expected = {"warmup_updates": warmup, "max_update": updates, "seeds": [1, 2, 3, 4, 5]}
        expected |= {"adam_betas": "(0.9, 0.999)", "weight_decay": 0.01, "clip_norm": 1.0}
        metrics = METRICS
    else:
        rates, batch, metrics = [2e-5, 3e-5, 4e-5], 32, {**METRICS, "QQP": "f1", "MRPC": "f1"}
        expected = {"adam_betas": "(0.9, 0.98)", "weight_decay": 0.1, "clip_norm": 0.0}
        expected |= {"warmup_ratio": 0.06, "max_epoch": 3, "seeds": [1]}  # RoBERTa's
    expected |= {"adam_eps": 1e-6, "dropout": 0.1, "attention_dropout": 0.1, "batch_size": batch}
    expected |= {"learning_rates": rates, "lr": rates[:1], "maximize_best_checkpoint_metric": True}
    expected["best_checkpoint_metric"] = metrics.get(name, "accuracy")
    config = recipes.compose_file(CONFIGS / f"{TASKS[name].config_name(protocol)}.yaml")
    sections = ("model", "task", "optimizer", "optimization", "lr_scheduler", "dataset")
    parts = [config[section] for section in (*sections, "checkpoint")]
    assert {key: part[key] for part in parts for key in part if key in expected} == expected
    assert config.dataset.get("valid_subset", "valid").split(",") == TASKS[name].valid_splits


def test_updates_follow_from_the_data_or_the_paper():
    left_out = ["~task.learning_rates", "~task.seeds", "~task.warmup_ratio"]
    for name, changes, *expected in (
        ("m4m_mrpc", [], 345, 21),  # 3668 examples are 114 batches of 32 and one of 20
        ("m4m_mrpc", ["dataset.batch_size=16", "optimization.update_freq=[2]"], 345, 21),
        ("m4m_mrpc", ["lr_scheduler.warmup_updates=0"], 345, 0),
        ("m4m_mrpc", ["++lr_scheduler.warmup_updates=0"], 345, 0),
        ("decbert_mrpc", [], 2296, 137),
        ("m4m_mrpc", [*left_out, "common.seed=9"], 345, 0),
    ):
        found = recipes.compose_recipe(CONFIGS / f"{name}.yaml", 3668, changes)
        assert [found.optimization.max_update, found.lr_scheduler.warmup_updates] == expected
        assert set(found.model) == {"_name", "dropout", "attention_dropout"}
    # A recipe may leave rates, seeds and warm-up open.
    assert (found.task.learning_rates, found.task.seeds) == ([], [])
    assert (found.optimization.lr, found.common.seed) == ([2e-5], 9)


@pytest.mark.parametrize("value", ["true", "True", "yes", "on", "1", "false", "no", "0"])
def test_the_cpu_is_chosen_by_every_value_that_fairseq_reads_as_true(value):
    word = f"++common.cpu={value}"
    (read,) = OverridesParser.create().parse_overrides([word])
    found = OmegaConf.merge(CommonConfig, {"cpu": read.value()}).cpu
    assert bool(recipes._ON_CPU.fullmatch(word)) == found


def test_hydra_reads_values_back():
    values = ["learned+m4m(max_distance=64)", "lr,rl", "/a b/c", "it's", "", 3, False, [2e-05]]
    values += ["null", "True", "NaN", "inf", ".5", "/home/José"]
    for value in values:
        word = recipes.format_override("model.x", value)
        (read,) = OverridesParser.create().parse_overrides([word])
        assert read.value() == value


def result(task: str, rate: float, seed: int, **figures: float) -> report.GlueResult:
    """Return a run's result; its first figure is the reported one, and with 53 it has collapsed."""
    folder, collapsed = f"/out/{task}/lr{rate:g}-seed{seed}", 53 in figures.values()
    return report.GlueResult(task, next(iter(figures)), rate, seed, folder, 5, figures, collapsed)


RTE = [
    result("RTE", rate, seed, accuracy=value, f1=value + 1)
    for rate, values in ((1e-5, (60.0, 64.0, 62.0)), (2e-5, (70.0, 66.0, 53.0)))
    for seed, value in enumerate(values, start=1)
]
MNLI = [
    result("MNLI", 1e-5, 1, accuracy_m=20.0, accuracy_mm=70.0),
    result("MNLI", 1e-5, 2, accuracy_m=40.0, accuracy_mm=50.0),
]
FACTS = {"name": "mine", "checkpoint": "x.pt", "unfinished": "QQP, seed 2"}


@pytest.mark.parametrize(
    ("protocol", "statistic", "figures"),
    [
        ("m4m", "best run", "40.00 | 50.00 | 70.00 | 53.33 |"),  # 50: of the run with 40
        ("decbert", "mean of the seeds", "30.00 | 60.00 | 63.00 | 51.00 |"),
    ],
)
def test_the_report_has_the_papers_statistic_of_the_best_rate(protocol, statistic, figures):
    record = report.build_record([*RTE, *MNLI], "m4m", {**FACTS, "protocol": protocol})
    lines = report.format_report(record).splitlines()
    columns = lines.index(f"| {statistic} | MNLI-m | MNLI-mm | RTE | average |")
    assert columns == lines.index(f"| **mine** | {figures}") - 2
    assert "| MNLI | accuracy m | 1e-05 | 2 | 40.00 | 30.00 | 30.00 | 14.14 |" in lines
    assert "| RTE | accuracy | 2e-05 | 3 | 70.00 | 63.00 | 66.00 | 8.89 |" in lines
    assert [line for line in lines if line.startswith("- ")] == ["- `/out/RTE/lr2e-05-seed3`"]
    assert "Not finished: QQP, seed 2." in lines
    means = {row["metric"]: row["mean"] for row in record.figures["tasks"]}
    assert means == {"accuracy_m": 30, "accuracy_mm": 60, "accuracy": 63, "f1": 64}
    assert report.find_best(RTE) == RTE[3]
    alone = report.build_record(RTE[-1:], "m4m", record.data)
    assert alone.figures["tasks"][0]["std"] == 0.0
    row = "| RTE | accuracy | 2e-05 | 1 | 53.00 | 53.00 | 53.00 | - |"
    assert row in report.format_report(alone)
