"""Folders of stock classes, which state all of the new positions and need nothing of us."""

import json
import logging

import pytest
import torch
from transformers import AutoModelForCausalLM

from fairseq_posenc.errors import UserError
from fairseq_posenc.hf import read_positions, set_positions, stock_folders
from fairseq_posenc.hf.stock_folders import NoStockModelError, find_stock_model
from fairseq_posenc.workbench.hf.folders import is_stock, load_model
from tests.helpers.commands import run
from tests.helpers.hf_models import MODELS, compute_logits, distance, make_inputs, pad
from tests.helpers.products import some_of
from tests.hf.test_families import ALIKE, ROTATED, build

SCALED = ["yarn:2", "linear:2", "dynamic:2", "llama3:8", "proportional:2:part=0.5", "ntk:2"]
# Of hybrids two, as `own` is tested with all of them elsewhere, and those unlike the others.
UNLIKE = ["lfm2", "qwen3_5_moe_text", "gemma4_text", "glm4v_moe_text", "granite_swa"]
UNLIKE += ["ministral3", "qwen3_moe"]
STOCK = [  # a model, a spec, and the class whose folder is written
    *(("llama", f"own(scaling={scaling})", "Llama") for scaling in SCALED),
    ("llama", "3*own,none", "SmolLM3"),
    ("llama", "3*own+window(size=5),own", "SmolLM3"),
    ("llama", "own+window(size=5),none", "SmolLM3"),
    ("mistral", "rope(layout=half)+window(size=7)", "Mistral"),
    ("qwen3", "own+window(size=5),own", "Qwen3"),
    ("olmo2", "own+window(size=5),own", "Olmo3"),
    ("phi3", "own(fraction=0.5)", "Phi3"),
    ("gpt_neox", "own(fraction=0.25,scaling=yarn:2)", "GPTNeoX"),
    ("cohere2", "own(scaling=yarn:2)", "Cohere2"),
    ("gemma2", "own(base=500)", "Gemma2"),
    ("gemma3", "own(scaling=yarn:2)", "Gemma3"),
    *((kind, "own(scaling=yarn:2)", "ModernBert") for kind in ("modernbert", "modernbert-decoder")),
    ("gpt_oss", "own(scaling=yarn:4)", "GptOss"),
    ("smollm3", "none,own", "SmolLM3"),
    ("t5", "own", "T5"),
    *((kind, "own(base=700)", "") for kind in some_of(UNLIKE, ROTATED)),
]
TABLES = ["bert", "gpt2", "opt", "roberta", "bart", "m2m_100", "marian", *ALIKE]


@pytest.mark.parametrize(("kind", "spec", "class_name"), STOCK)
def test_a_stock_class_gives_the_models_logits(kind, spec, class_name, tmp_path):
    tiny = MODELS.get(kind)
    model, inputs = (tiny.build(), make_inputs(tiny)) if tiny else build(kind)
    set_positions(model, spec)
    model.save_pretrained(tmp_path)
    assert is_stock(tmp_path)
    loaded = load_model(tmp_path)
    assert type(loaded).__name__.startswith(class_name)
    if "ntk" not in spec:  # which is another base there
        assert read_positions(loaded) == read_positions(model)
    for left, right in ((0, 3), (3, 0)) if tiny is None or not tiny.has_encoder else ():
        padded = pad(inputs, left, right)
        if model.can_generate():  # as `generate` does
            padded["position_ids"] = (padded["attention_mask"].cumsum(1) - 1).clamp(min=0)
        real = slice(left, left + 12)
        assert distance(*[compute_logits(part, padded)[:, real] for part in (loaded, model)]) < 2e-5
    if model.can_generate():
        prompt = {key: x for key, x in inputs.items() if "decoder" not in key}
        prompt = {**pad(prompt, 3, 0), "max_new_tokens": 5, "pad_token_id": 0}
        assert torch.equal(*[part.generate(**prompt, do_sample=False) for part in (loaded, model)])


@pytest.mark.parametrize("name", TABLES)
def test_a_longer_table_of_the_models_own_is_stock(name, tmp_path):
    tiny = MODELS[ALIKE.get(name, name)]
    model, inputs = build(name)[0] if name in ALIKE else tiny.build(), make_inputs(tiny, length=12)
    before = compute_logits(model, inputs)
    set_positions(model, "own", max_positions=100, extend="copy").save_pretrained(tmp_path)
    assert is_stock(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)  # as programs do that know only the model
    assert type(loaded) is type(model).stock
    assert distance(compute_logits(loaded, inputs), before) < 1e-5
    long = make_inputs(tiny, length=90)
    assert distance(compute_logits(loaded, long), compute_logits(model, long)) < 1e-5


@pytest.mark.parametrize("name", ["BertForMultipleChoice", "T5ForSequenceClassification"])
def test_heads_that_take_other_inputs_are_saved_as_stock(name, tmp_path):
    model = MODELS[name.split("For")[0].lower()]._replace(model=name).build()
    set_positions(model, "own").save_pretrained(tmp_path)
    assert is_stock(tmp_path)


@pytest.mark.parametrize("head", ["MaskedLM", "TokenClassification", "MultipleChoice"])
def test_a_stock_head_that_computes_something_else_is_not_saved(head, monkeypatch):
    """As if the stock class made its head again after it got the weights."""
    model = set_positions(MODELS["bert"]._replace(model=f"BertFor{head}").build(), "own")

    def tie_weights(stock, **named):
        *_, last = (part for part in stock.modules() if isinstance(part, torch.nn.Linear))
        last.weight = torch.nn.Parameter(torch.randn_like(last.weight))

    monkeypatch.setattr(type(model).stock, "tie_weights", tie_weights)
    with pytest.raises(NoStockModelError, match=f"BertFor{head} (differ by|cannot compute)"):
        find_stock_model(model)


def test_windows_without_causality_are_saved_in_our_own_folder(tmp_path):
    set_positions(MODELS["mistral"].build(is_causal=False), "own").save_pretrained(tmp_path)
    assert not is_stock(tmp_path)


@pytest.mark.parametrize(
    ("kind", "spec", "words"),
    [
        ("llama", "own(scaling=proportional:2)+alibi", "LlamaConfig cannot state alibi; SmolLM3"),
        ("llama", "own+window(size=4,first=2)", "LlamaConfig cannot state window(size=4,first=2)"),
        ("llama", "own+window(size=4,prefill=true)", "LlamaConfig cannot state window(size=4,pre"),
        ("llama", "own+window(size=4),own+window(size=5)", "LlamaConfig cannot state window(size="),
        ("llama", "own(fraction=0.5,scaling=yarn:2)", "LlamaConfig cannot state rope(fraction=0"),
        ("qwen3", "3*own,none", "Qwen3Config cannot state 3*rope(layout=half),none, only rope("),
        ("gpt2", "none", "GPT2Config cannot state none"),
        ("bart", "own+window(size=4)", "BartConfig cannot state window(size=4)"),
        ("whisper", "own", "models that read more than text"),
    ],
)
def test_else_a_line_says_what_it_cannot_state(kind, spec, words, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    set_positions(MODELS[kind].build(), spec).save_pretrained(tmp_path)
    assert not is_stock(tmp_path)
    (line,) = [x.getMessage() for x in caplog.records]  # nothing of configurations that were tried
    assert f"only this package loads the saved model: {words}" in line


@pytest.mark.parametrize(("base", "size"), [(501.0, 512), (500.0, 500)])
def test_a_stock_model_that_computes_something_else_is_not_saved(base, size, monkeypatch):
    """As if ``write_configuration`` had a fault that reading back does not show."""
    model = MODELS["mistral"].build(max_position_embeddings=600)
    set_positions(model, "rope(layout=half,base=500)+window")  # whose size is 512 by default

    def write(*args, original=stock_folders.write_configuration):
        config = original(*args)
        config.rope_parameters["rope_theta"], config.sliding_window = base, size
        return config

    monkeypatch.setattr(stock_folders, "write_configuration", write)
    with pytest.raises(NoStockModelError, match="MistralForCausalLM differ by"):
        find_stock_model(model)
    model.config._attn_implementation = "sdpa"
    with pytest.raises(UserError, match="its attention 'sdpa' leaves"):  # an error of the model
        find_stock_model(model)


def test_a_model_with_nan_for_padding_or_other_weights_is_not_saved_as_stock():
    model = set_positions(MODELS["llama"].build(), "own(base=500)")
    model.get_input_embeddings().weight.data[0] = torch.nan
    with pytest.raises(NoStockModelError, match="LlamaForCausalLM differ by nan"):
        find_stock_model(model)
    model.extra = torch.nn.Linear(2, 2)
    with pytest.raises(NoStockModelError, match=r"LlamaForCausalLM has other weights: .*extra"):
        find_stock_model(model)


def test_folders_that_a_trainer_resumes_from_keep_the_record(tmp_path):
    model = set_positions(MODELS["llama"].build(), "alibi")
    model.save_pretrained(tmp_path / "model")
    set_positions(model, "rope(layout=half,base=500)")
    model.train().model.norm.eval()  # as a frozen part may be
    for name, stock in (("checkpoint-8", False), ("model", True)):
        model.save_pretrained(tmp_path / name)
        found = is_stock(tmp_path / name), model.training, model.model.norm.training
        assert found == (stock, True, False)
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors"}
    AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-8").save_pretrained(tmp_path)
    assert len({(tmp_path / x / "config.json").read_text() for x in (".", "model")}) == 1


# Run where this package cannot be imported.
STRANGER = """
import json, sys
sys.modules["fairseq_posenc"] = None
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
ids = torch.tensor(json.loads(sys.argv[2]))
print(json.dumps(model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0).tolist()))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", some_of(["own+window(size=5),none"], ["own(scaling=yarn:4)", "own+window(size=5),none"])
)
def test_a_process_without_this_package_generates_the_same(spec, tmp_path):
    model = set_positions(MODELS["llama"].build(), spec)
    model.save_pretrained(tmp_path)
    ids = make_inputs(MODELS["llama"])["input_ids"][:1]
    ran = run("python", "-c", STRANGER, tmp_path, json.dumps(ids.tolist()))
    expected = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert json.loads(ran.out) == expected.tolist()


@pytest.mark.parametrize("name", ["llama", "m2m_100", "marian"])
def test_half_precision_is_compared_too(name, tmp_path):
    model = MODELS[name].build().to(torch.bfloat16)
    set_positions(model, "own+window(size=5),own" if name == "llama" else "own")
    model.save_pretrained(tmp_path)
    assert is_stock(tmp_path)
    assert type(model).from_pretrained(tmp_path).dtype == torch.bfloat16
