"""Classes of transformers beside the models here that are nearest to them: what differs is run.

``python -m tests.helpers.hf_neighbours`` prints the table of ``docs/exchange.md``. Each class gets
the weights of a tiny model with random ones, as far as it has a place for them; then its parts are
replaced by those of the model, one after the other, until the scores are equal. So no other part
differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

from fairseq_posenc.workbench.convert.exchange.hf_mapping import join_query_key_value
from tests.helpers.exchanged import checkpoint
from tests.workbench.convert.test_exchange import padded

SIZES: dict[str, Any] = {"vocab_size": 44, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
WIDTH, HEADS, LAYERS, POSITIONS = 32, 4, 3, 24
GPT_NEOX: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
}
Step = tuple[str, Callable[[], None]]


class Pair(NamedTuple):
    """A model here, and a class of transformers with its weights.

    Attributes:
        ours: the stack here.
        theirs: the class.
        steps: what is replaced in it, and how.
    """

    ours: Any
    theirs: Any
    steps: list[Step]


class FeedForward(nn.Module):
    """The feed-forward network of a layer here."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.fc1, self.fc2, self.activation = layer.fc1, layer.fc2, layer.activation_fn

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        """Return ``(B, T, C)``; a residual of theirs is added."""
        return sum(args, self.fc2(self.activation(self.fc1(x))))


def causal(spec: str) -> Any:
    """Return a causal decoder here, its feed-forward layers as wide as theirs have to be."""
    return checkpoint("causal_lm", spec, decoder_ffn_embed_dim=4 * WIDTH).model.decoder


def encoder(spec: str) -> Any:
    """Return an encoder here that norms before each block, without head."""
    model = checkpoint("masked_lm", spec, encoder_normalize_before=True).model
    return model.encoder.sentence_encoder


def placed(ours: Any, theirs: Any, names: dict[str, str], fused: bool = True) -> set[str]:
    """Give a class the weights of a stack; return the names of those that it has no place for.

    Args:
        ours: the stack.
        theirs: the class.
        names: beginnings of names here, and what they are there, ``{}`` for a layer's number.
        fused: whether queries, keys and values are one matrix there, head by head.
    """
    found = {}
    for name, weight in ours.named_parameters():
        _, layer, rest = name.split(".", 2) if name.startswith("layers.") else ("", "", name)
        start = next((each for each in names if rest.startswith(each)), None)
        if start is not None:
            found[names[start].format(layer) + rest.removeprefix(start)] = weight.detach()
    found = join_query_key_value(found, HEADS) if fused else found
    info = theirs.load_state_dict(found, strict=False)
    return set(info.unexpected_keys)


def scores(ours: Any, theirs: Any, **more: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the scores of both on sentences padded on the left and on the right."""
    for side in ("left", "right"):
        tokens, real = padded(side)
        extra = {name: value(real) for name, value in more.items()}
        with torch.no_grad():
            found = theirs(input_ids=tokens, attention_mask=real.long(), **extra)
            if hasattr(ours, "output_projection"):
                yield ours(tokens)[0][real], found.logits[real]
            else:
                states = ours(tokens, tokens.ne(1).sum(1))["encoder_out"][0].transpose(0, 1)
                yield states[real], found.last_hidden_state[real]


def difference(ours: Any, theirs: Any, **more: Any) -> float:
    """Return the largest difference, in parts of the largest score."""
    return max(
        float((one - other).abs().max() / one.abs().max())
        for one, other in scores(ours, theirs, **more)
    )


def replacing(ours: Any, layers: Any, name: str, what: Callable[[Any], Any]) -> Callable[[], None]:
    """Build a function that puts a module of each layer here into its place there."""

    def replace() -> None:
        for there, here in zip(layers, ours.layers):
            owner, _, last = name.rpartition(".")
            setattr(there.get_submodule(owner), last, what(here))

    return replace


def norms(ours: Any, theirs: Any, layers: Any, names: tuple[str, str], last: str) -> Step:
    """Return the step that gives a class the layer norms here."""

    def replace() -> None:
        replacing(ours, layers, names[0], lambda here: here.self_attn_layer_norm)()
        replacing(ours, layers, names[1], lambda here: here.final_layer_norm)()
        owner, _, name = last.rpartition(".")
        setattr(theirs.get_submodule(owner), name, ours.layer_norm)

    return "layer norms", replace


def neox_names(start: str, attention: str, norm: tuple[str, str, str]) -> dict[str, str]:
    """Return names as GPT-NeoX and BLOOM have them."""
    parts = {f"self_attn.{p}_proj.": f"{start}.{attention}.query_key_value.{p}." for p in "qkv"}
    return {
        **parts,
        "self_attn.out_proj.": f"{start}.{attention}.dense.",
        "self_attn_layer_norm.": f"{start}.{norm[0]}.",
        "final_layer_norm.": f"{start}.{norm[1]}.",
        "fc1.": f"{start}.mlp.dense_h_to_4h.",
        "fc2.": f"{start}.mlp.dense_4h_to_h.",
        "layer_norm.": norm[2],
    }


def embedded(ours: Any, theirs: Any, output: str) -> None:
    """Give a causal class the embeddings, with their factor at the input alone."""
    table = ours.embed_tokens.weight.detach()
    theirs.get_input_embeddings().weight.data = table * ours.embed_scale
    theirs.get_submodule(output).weight.data = table.clone()


def gpt_neox() -> Pair:
    ours = causal("rope(layout=half)")
    config = transformers.GPTNeoXConfig(
        **SIZES, **GPT_NEOX, intermediate_size=4 * WIDTH, rotary_pct=1.0,
        use_parallel_residual=False, tie_word_embeddings=False, max_position_embeddings=POSITIONS,
    )  # fmt: skip
    theirs = transformers.GPTNeoXForCausalLM(config).eval()
    start = "gpt_neox.layers.{}"
    last = ("input_layernorm", "post_attention_layernorm", "gpt_neox.final_layer_norm.")
    placed(ours, theirs, neox_names(start, "attention", last))
    embedded(ours, theirs, "embed_out")
    return Pair(ours, theirs, [])


def bloom() -> Pair:
    ours = causal("alibi")
    config = transformers.BloomConfig(
        **SIZES, hidden_size=WIDTH, n_head=HEADS, n_layer=LAYERS, tie_word_embeddings=False
    )
    theirs = transformers.BloomForCausalLM(config).eval()
    last = ("input_layernorm", "post_attention_layernorm", "transformer.ln_f.")
    placed(ours, theirs, neox_names("transformer.h.{}", "self_attention", last))
    embedded(ours, theirs, "lm_head")

    def without_norm() -> None:
        theirs.transformer.word_embeddings_layernorm = nn.Identity()

    gelu = replacing(ours, theirs.transformer.h, "mlp.gelu_impl", lambda here: nn.GELU())
    return Pair(ours, theirs, [("the norm of embeddings", without_norm), ("tanh gelu", gelu)])


def mpt() -> Pair:
    ours = causal("alibi")
    config = transformers.MptConfig(
        **SIZES, d_model=WIDTH, n_heads=HEADS, n_layers=LAYERS, max_seq_len=POSITIONS,
        expansion_ratio=4, tie_word_embeddings=False,
    )  # fmt: skip
    theirs = transformers.MptForCausalLM(config).eval()
    embedded(ours, theirs, "lm_head")
    blocks = theirs.transformer.blocks

    def attention() -> None:
        for there, here in zip(blocks, ours.layers):
            attn = here.self_attn
            parts = [attn.q_proj, attn.k_proj, attn.v_proj]
            there.attn.Wqkv = nn.Linear(WIDTH, 3 * WIDTH)
            there.attn.Wqkv.weight.data = torch.cat([each.weight.data for each in parts])
            there.attn.Wqkv.bias.data = torch.cat([each.bias.data for each in parts])
            there.attn.out_proj = attn.out_proj

    ffn = replacing(ours, blocks, "ffn", FeedForward)
    both = norms(ours, theirs, blocks, ("norm_1", "norm_2"), "transformer.norm_f")[1]

    def all_of_them() -> None:
        attention()
        ffn()
        both()

    return Pair(ours, theirs, [("layers without biases", all_of_them)])


def falcon() -> Pair:
    ours = causal("alibi")
    config = transformers.FalconConfig(
        **SIZES, **GPT_NEOX, alibi=True, bias=True, parallel_attn=False, multi_query=False,
        new_decoder_architecture=False, tie_word_embeddings=False,
    )  # fmt: skip
    theirs = transformers.FalconForCausalLM(config).eval()
    last = ("input_layernorm", "post_attention_layernorm", "transformer.ln_f.")
    placed(ours, theirs, neox_names("transformer.h.{}", "self_attention", last))
    embedded(ours, theirs, "lm_head")

    def unscaled() -> None:
        module: Any = transformers.models.falcon.modeling_falcon

        def penalties(mask: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
            steps = ((mask.cumsum(-1) - 1) * mask)[:, None, :]  # [B, 1, S]
            slopes = 2.0 ** (-8.0 / heads * torch.arange(1, heads + 1))
            found = slopes[:, None] * steps * math.sqrt(WIDTH // heads)
            return found.flatten(0, 1)[:, None]

        module.build_alibi_tensor = penalties

    return Pair(ours, theirs, [("penalties, divided as the scores are, in bfloat16", unscaled)])


def llama() -> Pair:
    ours = causal("rope(layout=half)")
    config = transformers.LlamaConfig(
        **SIZES, **GPT_NEOX, intermediate_size=4 * WIDTH, attention_bias=True,
        max_position_embeddings=POSITIONS, tie_word_embeddings=False,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).eval()
    start = "model.layers.{}.self_attn."
    names = {f"self_attn.{part}_proj.": f"{start}{part}_proj." for part in "qkv"}
    placed(ours, theirs, {**names, "self_attn.out_proj.": f"{start}o_proj."}, fused=False)
    embedded(ours, theirs, "lm_head")
    layers = theirs.model.layers
    last = ("input_layernorm", "post_attention_layernorm")
    return Pair(
        ours,
        theirs,
        [
            ("gated feed-forward layers", replacing(ours, layers, "mlp", FeedForward)),
            norms(ours, theirs, layers, last, "model.norm"),
        ],
    )


def modernbert() -> Pair:
    ours = encoder("rope(layout=half)")
    config = transformers.ModernBertConfig(
        **SIZES, **GPT_NEOX, intermediate_size=48, attention_bias=True, norm_bias=True,
        global_attn_every_n_layers=1, global_rope_theta=10000.0, local_rope_theta=10000.0,
        max_position_embeddings=POSITIONS, cls_token_id=0, sep_token_id=2,
    )  # fmt: skip
    theirs = transformers.ModernBertModel(config).eval()
    theirs.embeddings.tok_embeddings.weight.data = ours.embed_tokens.weight.data
    theirs.embeddings.norm = ours.layernorm_embedding
    for there, here in zip(theirs.layers, ours.layers):
        attn = here.self_attn
        parts = [attn.q_proj, attn.k_proj, attn.v_proj]
        there.attn.Wqkv.weight.data = torch.cat([each.weight.data for each in parts])
        there.attn.Wqkv.bias.data = torch.cat([each.bias.data for each in parts])
        there.attn.Wo = attn.out_proj
        there.mlp_norm = here.final_layer_norm
        if not isinstance(there.attn_norm, nn.Identity):
            there.attn_norm = here.self_attn_layer_norm
    theirs.final_norm = ours.layer_norm

    def first_norm() -> None:
        theirs.layers[0].attn_norm = ours.layers[0].self_attn_layer_norm

    ffn = replacing(ours, theirs.layers, "mlp", FeedForward)
    steps = [("gated feed-forward layers", ffn), ("a first layer without its norm", first_norm)]
    return Pair(ours, theirs, steps)


def t5() -> Pair:
    ours = encoder("t5(scale_factor=0.125)")  # by which the scale, of heads of 8, is 1
    config = transformers.T5Config(
        **SIZES, d_model=WIDTH, d_kv=WIDTH // HEADS, d_ff=48, num_layers=LAYERS, num_heads=HEADS,
        relative_attention_num_buckets=32, relative_attention_max_distance=128,
    )  # fmt: skip
    theirs = transformers.T5EncoderModel(config).eval()
    blocks = theirs.encoder.block
    first = blocks[0].layer[0].SelfAttention
    embeddings = theirs.get_input_embeddings()
    embeddings.weight.data = ours.layernorm_embedding(ours.embed_tokens.weight).detach()
    for there, here in zip(blocks, ours.layers):
        for name, part in zip("qkvo", ("q_proj", "k_proj", "v_proj", "out_proj")):
            getattr(there.layer[0].SelfAttention, name).weight.data = getattr(
                here.self_attn, part
            ).weight.data
    ((_, encoding),) = ours.encodings.items()
    first.relative_attention_bias.weight.data = encoding.table.data.t()

    def all_of_them() -> None:
        for there, here in zip(blocks, ours.layers):
            attn = there.layer[0].SelfAttention
            own = here.self_attn
            attn.q, attn.k, attn.v, attn.o = own.q_proj, own.k_proj, own.v_proj, own.out_proj
            there.layer[1].DenseReluDense = FeedForward(here)

    def other_norms() -> None:
        for there, here in zip(blocks, ours.layers):
            there.layer[0].layer_norm = here.self_attn_layer_norm
            there.layer[1].layer_norm = here.final_layer_norm
        theirs.encoder.final_layer_norm = ours.layer_norm

    steps = [("layers without biases, relu", all_of_them), ("layer norms", other_norms)]
    return Pair(ours, theirs, steps)


def gpt2() -> Pair:
    ours = causal("learned")
    config = transformers.GPT2Config(
        **SIZES, n_embd=WIDTH, n_head=HEADS, n_layer=LAYERS, n_positions=POSITIONS,
        activation_function="gelu", tie_word_embeddings=False,
    )  # fmt: skip
    theirs = transformers.GPT2LMHeadModel(config).eval()
    embedded(ours, theirs, "lm_head")
    (table,) = ours.embed_positions.parameters()
    theirs.transformer.wpe.weight.data = table.data
    for there, here in zip(theirs.transformer.h, ours.layers):
        own = here.self_attn
        parts = [own.q_proj, own.k_proj, own.v_proj]
        joint = {k: torch.cat([getattr(part, k).data for part in parts]) for k in _KINDS}
        for name, weight, bias in (
            ("attn.c_attn", joint["weight"], joint["bias"]),
            ("attn.c_proj", own.out_proj.weight.data, own.out_proj.bias.data),
            ("mlp.c_fc", here.fc1.weight.data, here.fc1.bias.data),
            ("mlp.c_proj", here.fc2.weight.data, here.fc2.bias.data),
        ):
            module = there.get_submodule(name)
            module.weight.data, module.bias.data = weight.t().contiguous(), bias
        there.ln_1, there.ln_2 = here.self_attn_layer_norm, here.final_layer_norm
    theirs.transformer.ln_f = ours.layer_norm
    forward = theirs.forward

    def counted() -> None:
        theirs.forward = lambda attention_mask, **kwargs: forward(
            attention_mask=attention_mask,
            position_ids=(attention_mask.cumsum(-1) - 1).clamp(min=0),
            **kwargs,
        )

    return Pair(ours, theirs, [("positions, which count padding on the left", counted)])


_KINDS = ("weight", "bias")
RELATIVES: dict[str, Callable[[], Pair]] = {
    "GPT-NeoX, for `rope(layout=half)`": gpt_neox,
    "BLOOM, for `alibi`": bloom,
    "MPT, for `alibi`": mpt,
    "Falcon, for `alibi`": falcon,
    "Llama, for `rope(layout=half)`": llama,
    "ModernBERT, for `rope(layout=half)`": modernbert,
    "T5's encoder, for `t5`": t5,
    "GPT-2, for `learned`": gpt2,
}


def compared(make: Callable[[], Pair]) -> tuple[float, list[tuple[str, float]]]:
    """Return the difference of a class as it is, and after each part that is replaced."""
    ours, theirs, steps = make()
    found, first = [], difference(ours, theirs)
    for told, replace in steps:
        replace()
        found.append((told, difference(ours, theirs)))
    return first, found


def main() -> None:
    """Print the table."""
    print("| class | as it is | and with these parts as here, one after the other |")
    print("| --- | ---: | --- |")
    for name, make in RELATIVES.items():
        first, found = compared(make)
        steps = "; ".join(f"{told}: {left:.0e}" for told, left in found) or "nothing differs"
        print(f"| {name} | {first:.0e} | {steps} |", flush=True)


if __name__ == "__main__":
    main()
