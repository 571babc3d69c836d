"""The three families: parity with fairseq's own, padding, decoding, checkpointing, copies."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from fairseq.tasks.masked_lm import MaskedLMConfig, MaskedLMTask

from fairseq_posenc import registry, specs
from fairseq_posenc.assembly import count_parameters
from fairseq_posenc.backends import triton
from fairseq_posenc.encodings.base import Dims
from fairseq_posenc.errors import UserError
from fairseq_posenc.identity import is_identity
from fairseq_posenc.positions import Positions
from fairseq_posenc.shared import Shared
from fairseq_posenc.transformer.attention import PositionalAttention
from fairseq_posenc.transformer.forward_context import set_context
from tests.helpers import oracles
from tests.helpers.commands import sentences
from tests.helpers.formulas import wake
from tests.helpers.products import product_of, some_of
from tests.helpers.tiny_models import (
    ARCHITECTURES,
    COMPOSITIONS,
    PATTERNS,
    STOCK,
    assert_decoding_equals_full_pass,
    logits,
    make_model,
    make_tokens,
    needs_causal,
)

FAMILIES = list(ARCHITECTURES)
SPECS = [*registry.names(), *COMPOSITIONS, *PATTERNS, "sinusoidal(layout=fairseq)"]
# Every encoding in every family that it has a meaning in; options are tested on the attention.
CASES = [
    (family, spec)
    for family in FAMILIES
    for spec in SPECS
    if family == "causal_lm" or not needs_causal(spec)
]
# Every encoding in one of them, in turn: modules that are copied one by one need no product.
IN_TURN = [
    ("causal_lm" if needs_causal(spec) else FAMILIES[number % len(FAMILIES)], spec)
    for number, spec in enumerate(SPECS)
]
CROSS = "rope(cross_attention=true)"
DECODING = [case for case in CASES if case[0] != "masked_lm"]
PAD, EOS = 1, 2


def has_parameters(spec: str) -> bool:
    dims = Dims(embed_dim=32, num_heads=4, max_positions=24, causal=needs_causal(spec))
    return sum(count_parameters(specs.parse(spec), dims, layers=2).values()) > 0


def gradients(model, family, tokens):
    model.zero_grad()
    torch.manual_seed(7)
    logits(model, family, tokens).float().log_softmax(-1).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


PARITY = [
    ("masked_lm", "learned", {}),
    ("translation", "learned", {"encoder_learned_pos": True, "decoder_learned_pos": True}),
    ("translation", "sinusoidal(layout=fairseq)", {}),
    ("causal_lm", "learned", {"decoder_learned_pos": True}),
    ("causal_lm", "sinusoidal(layout=fairseq)", {}),
    ("causal_lm", "none", {"no_token_positional_embeddings": True}),
]


@pytest.mark.parametrize(("family", "spec", "stock_options"), PARITY)
def test_equals_fairseqs_own_model(family, spec, stock_options):
    """A stock checkpoint loads, and gives the same outputs and gradients."""
    theirs = make_model(family, STOCK[family], **stock_options)
    ours = make_model(family, position_encoding=spec)
    ours.load_state_dict(theirs.state_dict())
    tokens = make_tokens(padding=3)
    their_logits = logits(theirs, family, tokens)
    real = tokens.ne(PAD)
    found = logits(ours, family, tokens)[real]
    torch.testing.assert_close(found, their_logits[real], rtol=1e-5, atol=1e-5)
    tokens = make_tokens()
    theirs_by_name = gradients(theirs, family, tokens)
    for name, grad in gradients(ours, family, tokens).items():
        their = theirs_by_name[name.replace(".encodings.learned.table.", ".")]
        if ".encodings.learned." in name:
            their = their[2:]  # fairseq's unused rows before position 0
        torch.testing.assert_close(grad, their, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "spec", "directions"),
    [
        *((family, spec, "") for family, spec in some_of(IN_TURN, CASES)),
        *product_of(
            [("masked_lm", spec) for spec in SPECS if not needs_causal(spec)],
            ["lr,lr", "lr,rl", "rl,both,lr"],
        ),
    ],
)
def test_padding_on_either_side_changes_nothing(family, spec, directions):
    more = {"attention_directions": directions} if directions else {}
    model = wake(make_model(family, position_encoding=spec, **more))
    tokens = make_tokens()
    alone = logits(model, family, tokens)
    padding = torch.full((3, 4), PAD)
    right = logits(model, family, torch.cat([tokens, padding], 1))[:, :-4]
    left = logits(model, family, torch.cat([padding, tokens], 1))[:, 4:]
    torch.testing.assert_close(right, alone, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(left, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("direction", ["lr", "rl"])
def test_a_layer_with_a_direction_does_not_see_the_other_side(direction):
    model = make_model(
        "masked_lm", encoder_layers=1, position_encoding="m4", attention_directions=direction
    )
    tokens = make_tokens(1)
    changed = tokens.clone()
    changed[0, 4] = 4 + (tokens[0, 4] - 3) % 20
    same = torch.isclose(model(tokens)[0], model(changed)[0], atol=1e-7).all(-1)[0]
    before, after = same[:4], same[5:]
    assert bool(before.all()) == (direction == "lr")
    assert bool(after.all()) == (direction == "rl")


def test_rotary_cross_attention_sees_the_difference_of_source_and_target_positions():
    """It decodes as the full pass, ignores padding, and is no other model without positions."""
    model = make_model("translation", position_encoding="none", position_encoding_decoder=CROSS)
    source = make_tokens(2)
    target = make_tokens(2, 6)
    plain = make_model("translation", position_encoding="none", position_encoding_decoder="rope")
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if not is_identity(k)})
    out = model(source, source.ne(PAD).sum(1), target)[0]
    assert not torch.allclose(out, plain(source, source.ne(PAD).sum(1), target)[0], atol=1e-4)
    padding = torch.full((2, 3), PAD)
    for padded in (torch.cat([source, padding], 1), torch.cat([padding, source], 1)):
        torch.testing.assert_close(model(padded, padded.ne(PAD).sum(1), target)[0], out)


def test_rotary_cross_attention_equals_the_formula():
    model = make_model("translation", position_encoding="none", position_encoding_decoder=CROSS)
    attention = model.decoder.layers[0].encoder_attn.double()
    query, key = torch.randn(3, 1, 32).double(), torch.randn(5, 1, 32).double()
    (rope,) = model.decoder.encodings.as_list()
    at_target, at_source = (rope.rotation(torch.arange(length)[None]) for length in (3, 5))
    state = Shared(None, stack=model.decoder.settings[:2])
    with set_context((state._replace(rotation=at_target, source_rotation=at_source),)):
        ours, _ = attention(query, key, key, need_weights=False)

    def linear(projection, x):
        """Apply a projection without its rotation."""
        return torch.nn.functional.linear(x, projection.weight, projection.bias).detach()

    projected = zip((attention.q_proj, attention.k_proj, attention.v_proj), (query, key, key))
    heads = [linear(weight, x)[:, 0].view(-1, 4, 8).transpose(0, 1) for weight, x in projected]
    rotated_query = oracles.rope(heads[0], list(range(3)), {})
    rotated_key = oracles.rope(heads[1], list(range(5)), {})
    scores = torch.einsum("htd,hsd->hts", rotated_query, rotated_key) / 8**0.5
    attended = scores.softmax(-1) @ heads[2]
    theirs = linear(attention.out_proj, attended.transpose(0, 1).reshape(3, 32))
    torch.testing.assert_close(ours[:, 0], theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("family", "spec"), [*DECODING, ("translation", CROSS)])
def test_decoding_with_beam_reordering_equals_the_full_pass(family, spec):
    model = wake(make_model(family, position_encoding=spec))
    source = make_tokens(2).repeat_interleave(2, 0)  # two sentences, a beam of two
    source[2:, -2:] = PAD
    orders = [
        [*torch.randint(0, 2, (2,)).tolist(), *torch.randint(2, 4, (2,)).tolist()] for _ in range(8)
    ]
    assert_decoding_equals_full_pass(model, family, source, orders)


@pytest.mark.parametrize("spec", ["shaw", "m4+reset", "tupe", "tupe_shared+reset", "fire"])
def test_decoding_sentences_padded_on_the_left(spec):
    model = wake(make_model("causal_lm", position_encoding=spec))
    tokens = make_tokens(2)
    tokens[1, :2] = PAD
    state: dict = {}
    for length in range(1, 9):
        step = model.decoder(tokens[:, :length], incremental_state=state)[0][:, -1]
        full = model.decoder(tokens[:, :length])[0][:, -1]
        real = tokens[:, length - 1].ne(PAD)
        torch.testing.assert_close(step[real], full[real], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", ["tupe", "tupe_shared+reset", "shaw"])
def test_decoding_up_to_the_last_position_and_beyond(spec):
    limit = {"max_target_positions": 8, "tokens_per_sample": 8, "decoder_layers": 1}
    model = wake(make_model("causal_lm", position_encoding=spec, **limit))
    tokens = make_tokens(2, 10)
    state: dict = {}

    def step(length: int) -> torch.Tensor:
        return model.decoder(tokens[:, :length], incremental_state=state)[0][:, -1]

    for length in range(1, 9):
        full = model.decoder(tokens[:, :length])[0][:, -1]
        torch.testing.assert_close(step(length), full, rtol=1e-5, atol=1e-5)
    if spec == "shaw":  # repeats the ends of its table
        torch.testing.assert_close(step(9), model.decoder(tokens[:, :9])[0][:, -1])
        return
    with pytest.raises(UserError, match="9 tokens is longer than the 8 positions"):
        step(9)


@pytest.mark.parametrize("spec", ["m4m", "m4+reset", "tupe", "learned"])
def test_decoding_several_tokens_at_once_is_refused(spec):
    model = make_model("causal_lm", position_encoding=spec)
    state: dict = {}
    with pytest.raises(UserError, match="5 tokens were given to decode after 0"):
        model.decoder(make_tokens(2, 5), incremental_state=state)
    model.decoder(make_tokens(2, 1), incremental_state=state)
    with pytest.raises(UserError, match="3 tokens were given to decode after 1"):
        model.decoder(make_tokens(2, 3), incremental_state=state)


def test_arguments_of_a_decoder_may_have_fairseqs_order():
    decoder = make_model("causal_lm", position_encoding="alibi").eval().decoder
    tokens = make_tokens(2, 5)
    by_name = decoder.extract_features(tokens, alignment_layer=0)[1]
    by_place = decoder.extract_features(tokens, None, None, False, 0)[1]
    assert len(by_name["inner_states"]) == len(decoder.layers) + 1
    torch.testing.assert_close(by_place["inner_states"], by_name["inner_states"])


@pytest.mark.parametrize("name", registry.names())
def test_triton_can_be_required_where_it_serves(name, monkeypatch):
    """Whether it does must not depend on how far a layer has got with its terms."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    if why := triton.unavailable():
        pytest.skip(why)
    family = "causal_lm" if needs_causal(name) else "masked_lm"
    model = make_model(family, position_encoding=name)
    stack = getattr(model, "encoder" if family == "masked_lm" else "decoder")
    stack = getattr(stack, "sentence_encoder", stack)
    positions = Positions.from_tokens(make_tokens(1, 4), PAD, 2, 4)
    terms = stack.encodings.terms(positions)
    terms = terms | stack.layers[0].self_attn.encodings.terms(positions)
    decay = stack.layers[0].self_attn.encodings.decay(torch.zeros(1, 4, 32), None)
    without_kernels = {"pair_bias", "channel_gain", "counted_table", "state_table", "value_table"}
    if decay is None and not (without_kernels | {"reset"}) & {term.name for term in terms}:
        make_model(family, position_encoding=name, position_backend="triton")
        return
    with pytest.raises(UserError, match="position backend triton cannot compute this"):
        make_model(family, position_encoding=name, position_backend="triton")


@pytest.mark.parametrize(("family", "spec"), [*some_of(IN_TURN, CASES), ("translation", CROSS)])
def test_activation_checkpointing_gives_the_same_gradients(family, spec):
    options = {"position_encoding": spec, "dropout": 0.1, "attention_dropout": 0.1}
    if family == "masked_lm":
        options["attention_directions"] = "lr,rl"
    plain = wake(make_model(family, **options)).train()
    checkpointed = make_model(family, **options, checkpoint_activations=True).train()
    checkpointed.load_state_dict(plain.state_dict())
    tokens = make_tokens(padding=3)
    expected = gradients(plain, family, tokens)
    torch.testing.assert_close(gradients(checkpointed, family, tokens), expected)
    torch.manual_seed(7)
    two = [logits(checkpointed, family, make_tokens()).sum() for _ in range(2)]
    sum(two).backward()  # two forward passes before one backward pass
    assert all(p.grad.isfinite().all() for p in checkpointed.parameters() if p.grad is not None)


def test_offloading_activations_checkpoints_them():
    model = make_model("masked_lm", position_encoding="m4m", offload_activations=True).train()
    assert model.args.checkpoint_activations
    plain = make_model("masked_lm", position_encoding="m4m").train()
    plain.load_state_dict(model.state_dict())
    tokens = make_tokens()
    found, expected = (gradients(x, "masked_lm", tokens) for x in (model, plain))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("family", "spec", "frozen"),
    product_of(
        [case for case in some_of(IN_TURN, CASES) if has_parameters(case[1])],
        ["positions", "the rest"],
    ),
)
def test_positions_or_everything_else_can_be_frozen(family, spec, frozen):
    model = make_model(family, position_encoding=spec)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = (".encodings." in name) == (frozen == "the rest")
    logits(model, family, make_tokens()).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name


@pytest.mark.parametrize("family", FAMILIES)
def test_layerdrop_keeps_each_layers_direction_and_tables(family):
    side = "decoder" if family == "causal_lm" else "encoder"
    model = make_model(family, position_encoding="m4m", **{f"{side}_layerdrop": 0.5}).train()
    stack = getattr(model, side)
    stack = getattr(stack, "sentence_encoder", stack)
    expected = "lr" if family == "causal_lm" else "both"
    attentions = [m for m in stack.modules() if isinstance(m, PositionalAttention)]
    assert len(attentions) == stack.num_layers
    assert {a.direction for a in attentions} == {expected}
    tables = [a.encodings["m4m"].table.weight for a in attentions]
    for _ in range(5):  # each layer is left out in half of the passes
        logits(model, family, make_tokens()).square().sum().backward()
    assert len({table.data_ptr() for table in tables}) == len(tables)
    assert all(table.grad is not None for table in tables)


@pytest.mark.parametrize(("family", "spec"), [*IN_TURN, ("translation", CROSS)])
def test_copies_pickles_and_files_give_the_same_outputs(family, spec, tmp_path):
    model = wake(make_model(family, position_encoding=spec))
    tokens = make_tokens()
    expected = logits(model, family, tokens)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    loaded = make_model(family, position_encoding=spec)
    loaded.load_state_dict(torch.load(tmp_path / "model.pt"))
    others = copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded
    for parameter in model.parameters():
        parameter.data.zero_()  # the copies have weights of their own
    for other in others:
        torch.testing.assert_close(logits(other, family, tokens), expected, rtol=0, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_of_a_forward_pass_survives_it(family):
    model = make_model(family, position_encoding="sentence_learned+m4m")
    before = {id(module): set(vars(module)) for module in model.modules()}
    logits(model, family, make_tokens())
    for module in model.modules():
        assert set(vars(module)) - before[id(module)] <= {"_future_mask"}


@pytest.mark.parametrize(("family", "spec"), some_of(IN_TURN, CASES))
def test_half_precision_models_run_and_stay_close(family, spec):
    # Every family meets both types; test_attention.py has every encoding with both.
    dtype = torch.float16 if (FAMILIES.index(family) + SPECS.index(spec)) % 2 else torch.bfloat16
    model = wake(make_model(family, position_encoding=spec)).to(dtype)
    tokens = make_tokens()
    half = logits(model, family, tokens)
    exact = logits(model.float(), family, tokens)
    assert half.dtype == dtype
    scale = exact.abs().max()
    assert (half.float() - exact).abs().max() / scale < (0.02 if dtype == torch.float16 else 0.12)


def test_a_causal_lms_inner_sizes_follow_its_width():
    model = make_model("causal_lm", decoder_embed_dim=16, decoder_input_dim=0, decoder_output_dim=0)
    assert model.decoder.embed_tokens.embedding_dim == 16
    assert model.decoder.project_in_dim is None
    assert model.decoder.project_out_dim is None


NO_SDPA = "position backend sdpa cannot compute this"
BAD_OPTIONS = [
    ("masked_lm", {"max_positions": 10**12}, "128,000 GB, and this machine"),
    ("translation", {"position_encoding_decoder": "m4+m4m"}, "two encodings both have a"),
    (
        "causal_lm",
        {"position_encoding": "rope+window(prefill=true)"},
        "is for models of transformers: export",
    ),
    ("masked_lm", {"position_encoding": "m4(max=3)"}, "m4 has no option 'max=3': its options: max"),
    ("masked_lm", {"position_encoding": "3*rope,none"}, "a list of 4 layers, but the stack has 3"),
    ("causal_lm", {"position_encoding": "2*rope,none"}, "a list of 3 layers, but the stack has 2"),
    ("masked_lm", {"position_encoding": "rope,xpos"}, "xpos is for causal models"),
    ("masked_lm", {"position_encoding": "rope,m4m", "position_backend": "sdpa"}, NO_SDPA),
    ("masked_lm", {"position_encoding": "m4+m4m"}, "query table"),
    ("masked_lm", {"attention_directions": "lr,up"}, "unknown direction 'up': choose both"),
    ("masked_lm", {"attention_directions": ",rl"}, "unknown direction '': choose both"),
    ("masked_lm", {"attention_directions": "lr,lr,lr,rl"}, "names 4 layers, but the encoder has 3"),
    ("causal_lm", {"attention_directions": "lr"}, "for encoders"),
    ("causal_lm", {"decoder_attention_heads": 5}, "width 32 cannot be divided among 5"),
    ("translation", {"encoder_attention_heads": 5}, "width 32 cannot be divided among 5"),
    (
        "masked_lm",
        {"position_encoding": "rope", "encoder_embed_dim": 36},
        "9 coordinates: the number",
    ),
    ("masked_lm", {"position_encoding": "m4m", "position_backend": "sdpa"}, NO_SDPA),
    ("translation", {"encoder_xformers_att_config": "{}"}, "do not work with xformers"),
    ("translation", {"encoder_xformers_att_config": {}}, "do not work with xformers"),
    ("translation", {"cross_self_attention": True}, "cross-self-attention"),
    ("translation", {"no_token_positional_embeddings": True}, "--position-encoding none"),
    ("causal_lm", {"base_layers": 1}, "base-layers"),
    ("translation", {"position_encoding": "fire"}, "fire is for causal models"),
    ("masked_lm", {"position_encoding": "alibi(mode=causal)"}, "choose one of symmetric"),
    ("masked_lm", {"position_encoding": "m2+m4m"}, "multiply the scores cannot be combined"),
    ("masked_lm", {"position_encoding": "raffel+deberta"}, "set scale_factor of one of them"),
]


@pytest.mark.parametrize(("family", "options", "message"), BAD_OPTIONS)
def test_bad_options_are_refused_when_the_model_is_built(family, options, message):
    with pytest.raises(UserError, match=message) as caught:
        make_model(family, **options)
    assert "\n" not in str(caught.value)


def test_the_start_line_says_what_is_on(caplog):
    with caplog.at_level("INFO"):
        make_model("masked_lm", "decbert_diff", position_encoding="learned+m4m")
    assert (
        "encoder position encoding: learned+m4m | directions: lr x1 rl x1 both x1 | "
        "backend: auto | position parameters: 1,896" in caplog.text
    )


def test_a_masked_end_of_a_sentence_ends_it_where_the_task_hands_out_what_it_masks():
    """Positions are those of the unmasked text, in training as fairseq's task makes its batches."""
    settings = MaskedLMConfig(data=str(sentences()), mask_prob=0.4, seed=1)
    settings.include_target_tokens, settings.tokens_per_sample = True, 24
    task = MaskedLMTask.setup_task(settings)
    task.load_dataset("valid")
    data = task.dataset("valid")
    batch = data.collater([data[index] for index in range(len(data))])
    given, target = batch["net_input"], batch["target"]
    tokens = given["src_tokens"]
    whole = torch.where(target.eq(PAD), tokens, target)
    assert whole.ne(tokens).logical_and(whole.eq(EOS)).any(), "no end is masked: change the seed"
    model = make_model("masked_lm", position_encoding="sentence_learned")
    seen, shown = [], []
    stack = model.encoder.sentence_encoder
    stack.embed_positions.register_forward_hook(lambda *call: seen.append(call[2]))
    stack.embed_tokens.register_forward_hook(lambda *call: shown.append(call[1][0]))
    small = {name: value.clamp(max=23) for name, value in given.items() if name != "src_lengths"}
    model(**{**given, **small})
    model(whole.clamp(max=23))
    model(small["src_tokens"])
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(shown[0], small["src_tokens"]), "the model must not see what is masked"
    assert not torch.equal(seen[0], seen[2])
