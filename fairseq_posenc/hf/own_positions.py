"""The positions that a model of transformers has, as a spec.

A configuration names them in many ways: :func:`read_positions` reads all of them, layer by layer,
and refuses by name what no encoding of the library is. In a spec, ``own`` stands for them
(:func:`expand_own`).
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from fairseq_posenc.encodings.rope_parameters import read_rope
from fairseq_posenc.encodings.rope_scaling import TRAINED_LENGTH
from fairseq_posenc.errors import UserError, shortened
from fairseq_posenc.registry import options as options_of
from fairseq_posenc.specs import parse, split_layers

OWN = "own"
SPEC, LENGTH = "position_encoding", "position_encoding_max_positions"  # of a configuration

Config = Any  # a `PretrainedConfig`; `PreTrainedConfig` since version 5


def read_positions(model: Any) -> str:
    """Read the canonical spec of the positions that a model has.

    >>> from transformers import LlamaConfig
    >>> read_positions(LlamaConfig(rope_theta=500000.0))
    'rope(base=500000,layout=half)'

    Args:
        model: a model of transformers, or its configuration. Nothing else is read.

    Raises:
        UserError: the model's type is not known, or the library does not have such positions.
    """
    config = getattr(model, "config", model)
    spec = getattr(config, SPEC, None)
    if spec is not None:  # set by this package
        return str(parse(spec))
    config = config.get_text_config()
    kind = str(config.model_type)
    try:
        if kind in _TABLES:
            return str(parse(_TABLES[kind](config)))
        if kind not in _LAYOUTS:
            raise UserError(explain_unservable(config) or "its positions are not known here")
        if reason := _explain_other_layers(config):
            raise UserError(reason)
        return str(parse(join_layers(_read_layers(config, _LAYOUTS[kind]))))
    except UserError as error:
        raise UserError(f"a model of type {shortened(kind)!r}: {error}") from None


def count_positions(model: Any) -> int:
    """Count the positions that a model has room for.

    Raises:
        UserError: the configuration states no such number.
    """
    config = getattr(model, "config", model)
    return int(getattr(config, LENGTH, None) or read_trained_length(config))


def read_trained_length(model: Any) -> int:
    """Read the length that a model was trained at: its limit, or the rows of its table.

    Raises:
        UserError: the configuration states no such number.
    """
    config = getattr(model, "config", model).get_text_config()
    for name in ("max_position_embeddings", "max_target_positions", "n_positions"):
        size = getattr(config, name, None)
        if isinstance(size, int) and size > 0:
            # The first rows of these tables are for padding.
            return size - (config.pad_token_id + 1 if config.model_type in _AFTER_PADDING else 0)
    if config.model_type in ("t5", "mt5"):
        return _T5_LENGTH
    raise UserError(
        f"a model of type {shortened(str(config.model_type))!r} states no number of positions"
    )


def names_own(spec: str) -> bool:
    """Check whether a spec has the word ``own``.

    Raises:
        UserError: the spec is too long.
    """
    return any(_name(item) == OWN for layer in split_layers(spec) for item in layer)


def expand_own(spec: str, own_spec: str, num_layers: int | None = None) -> str:
    """Replace ``own`` in a spec by the positions that the model has; return the canonical spec.

    In layer i it is the model's layer i. Options in brackets change those of the model, in each
    layer that has them.

    >>> expand_own("2*own,own(base=500)+alibi", "rope,none,rope(layout=half)")
    'rope,none,rope(base=500,layout=half)+alibi'

    Args:
        spec: as a user writes it.
        own_spec: the spec of :func:`read_positions`.
        num_layers: of the model; None where both lists repeat without end.

    Raises:
        UserError: the spec cannot be read, or an option is one that the model's positions lack.
    """
    layers = split_layers(spec)
    for item in (item for layer in layers for item in layer if _name(item) == OWN):
        if "(" in item and not item.rstrip().endswith(")"):
            raise UserError(f"{shortened(item)}: the bracket is not closed")
    theirs = [layer.items for layer in parse(own_spec).split_layers()]
    count = math.lcm(len(layers), len(theirs))
    count = max(min(count, num_layers or count), len(layers))
    used: set[tuple[int, str]] = set()
    expanded = []
    for index in range(count):
        written = index % len(layers)
        items = [str(item) for item in theirs[index % len(theirs)]]
        parts: list[str] = []
        for item in layers[written]:
            if _name(item) == OWN:
                changed, options = _change_options(items, item)
                used |= {(written, option) for option in options}
                parts += changed
            else:
                parts.append(item)
        expanded.append("+".join(parts))
    for written, layer in enumerate(layers):
        for item in filter(lambda item: _name(item) == OWN, layer):
            for option in _read_options(item):
                if (written, option) not in used:
                    raise UserError(
                        f"{shortened(item)}: the model's positions there have no option "
                        f"{shortened(option)!r}; they are {shortened(own_spec)}"
                    )
    return str(parse(join_layers(expanded)))


def join_layers(layers: Sequence[str]) -> str:
    """Join the specs of successive layers to the shortest list that gives them when repeated."""
    count = len(layers)
    period = next(
        size
        for size in range(1, count + 1)
        if all(layers[index] == layers[index - size] for index in range(size, count))
    )
    return ",".join(layers[:period])


# Model types with rotations: how they form pairs, and which layers have none.
_HALF = (
    "apertus arcee bitnet cwm dots1 eurobert exaone4 flex_olmo gemma gemma2 gemma3_text glm4_moe "
    "gpt_neox gpt_oss granite granitemoe granitemoeshared hunyuan_v1_dense hunyuan_v1_moe hy_v3 "
    "hyperclovax jais2 jetmoe llama minimax_m2 ministral ministral3 mistral mixtral modernbert "
    "modernbert-decoder nemotron nomic_bert olmo olmo2 olmo3 olmoe persimmon phi phi3 "
    "phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open stablelm starcoder2 "
    "vaultgemma"
)
_PAIRS = "codegen cohere cohere2 ernie4_5 ernie4_5_moe glm glm4 gptj helium llama4_text"
_LAYOUTS = {
    **dict.fromkeys(_HALF.split(), "half"),
    **dict.fromkeys(_PAIRS.split(), "interleaved"),
}

# Tables of vectors, which the input is added to, and biases that all layers share.
_LEARNED = (
    "albert bart bert biogpt blenderbot blenderbot-small camembert distilbert electra ernie gpt2 "
    "gpt_bigcode mbart opt plbart roberta roberta-prelayernorm whisper xlm-roberta xlm-roberta-xl"
)
_AFTER_PADDING = ("camembert", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl")
_T5_LENGTH = 512  # tokens of its pre-training
_RELATIVE = {"absolute": "learned", "relative_key": "shaw", "relative_key_query": "m4"}


def _read_learned(config: Config) -> str:
    kind = getattr(config, "position_embedding_type", "absolute")
    if kind not in _RELATIVE:
        raise UserError(f"unknown position_embedding_type {shortened(repr(kind))}")
    return _RELATIVE[kind]


def _read_buckets(config: Config) -> str:
    buckets, farthest = (
        config.relative_attention_num_buckets,
        config.relative_attention_max_distance,
    )
    return f"t5(num_buckets={buckets},max_distance={farthest})"


_TABLES: dict[str, Callable[[Config], str]] = {
    **dict.fromkeys(_LEARNED.split(), _read_learned),
    **dict.fromkeys(("t5", "mt5"), _read_buckets),
    # All sines, then all cosines; those of fairseq count from the padding's index on.
    **dict.fromkeys(("marian", "pegasus"), lambda config: "sinusoidal(layout=half)"),
    **dict.fromkeys(("m2m_100", "xglm"), lambda config: "sinusoidal(layout=fairseq)"),
}


# Model types whose positions no spec describes, by a part of their names.
_REASONS = {
    "vl": "its own code counts them on several axes (M-RoPE)",
    "glm4v": "its own code counts them on several axes (M-RoPE)",
    "omni": "its own code counts them on several axes (M-RoPE)",
    "gemma4": "its layers have heads of two widths, and a spec is for one",
    "gemma3n": "its layers share keys and values with others",
    "umt5": "each layer has its own table of buckets, and here all layers share one",
    **dict.fromkeys(("bloom", "falcon", "mpt"), "its attention does not take another function"),
    **dict.fromkeys(("deberta", "xlnet"), "its attention does not take another function"),
}


def explain_unservable(model: Any) -> str | None:
    """Say why no positions can be given to models of a type; None where nothing is known of it.

    Args:
        model: a model of transformers, or its configuration.
    """
    config = getattr(model, "config", model).get_text_config()
    if getattr(config, "kv_lora_rank", None):
        return (
            "its latent attention (MLA) rotates a part of each head that its own code appends, so "
            "other positions cannot be set"
        )
    parts = re.split("[_-]", str(config.model_type))
    reason = next((reason for part, reason in _REASONS.items() if part in parts), None)
    if reason is not None:
        return f"its positions cannot be changed: {reason}"
    return _explain_other_layers(config)


def _explain_other_layers(config: Config) -> str | None:
    """Name the layers of a model that are not attention, such as linear attention."""
    kinds = {str(kind) for kind in getattr(config, "layer_types", None) or ()}
    other = sorted(kinds - {"full_attention", "sliding_attention", "chunked_attention"})
    if not other:
        return None
    return (
        f"it has layers of {shortened(', '.join(other))}, which have no scores of queries and "
        "keys to give positions to"
    )


def _read_layers(config: Config, layout: str) -> list[str]:
    """Write the spec of each layer of a model with rotations."""
    layers = []
    for index in range(config.num_hidden_layers):
        kind = _find_layer_kind(config, index)
        items = []
        if _is_rotated(config, index, kind):
            items.append(read_rope(_read_parameters(config, kind), _read_limit(config), layout))
        if kind == "sliding_attention":
            items.append(f"window(size={_read_window(config)})")
        if kind == "chunked_attention":
            items.append(f"chunk(size={config.attention_chunk_size})")
        layers.append("+".join([*items, *_read_softmax(config, index)]) or "none")
    return layers


def _find_layer_kind(config: Config, index: int) -> str:
    """Find which keys a layer sees, in the words of ``layer_types``."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return str(kinds[index])
    if config.model_type == "modernbert":  # up to transformers 4
        return ("sliding" if index % config.global_attn_every_n_layers else "full") + "_attention"
    window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return "sliding_attention" if window else "full_attention"


def _is_rotated(config: Config, index: int, kind: str) -> bool:
    """Check whether a layer has rotations."""
    if config.model_type in ("cohere2", "exaone4"):
        everywhere = config.model_type == "exaone4" and config.sliding_window is None
        return everywhere or kind == "sliding_attention"
    if config.model_type in ("llama4_text", "smollm3"):
        return bool(config.no_rope_layers[index])
    return getattr(config, "position_embedding_type", "rope") == "rope"


def _read_window(config: Config) -> int:
    """Read the size of windows, counted as the library does."""
    if config.model_type == "modernbert":
        return int(config.local_attention)
    if getattr(config, "use_bidirectional_attention", False):
        return 2 * (int(config.sliding_window) - 1)  # keys at a distance below it, on both sides
    return int(config.sliding_window)


def _read_softmax(config: Config, index: int) -> list[str]:
    """Write what changes the scores of a layer by position alone, or adds to the softmax."""
    if config.model_type == "gpt_oss":
        return ["sink"]
    if config.model_type in ("gemma2", "vaultgemma") and config.attn_logit_softcapping:
        return [f"softcap(cap={config.attn_logit_softcapping})"]
    if config.model_type == "llama4_text" and config.attn_temperature_tuning:
        factor = f"llama4(beta={config.attn_scale},length={int(config.floor_scale)})"
        return [] if config.no_rope_layers[index] else [factor]
    if config.model_type == "ministral3":
        parameters = config.rope_parameters
        return [
            f"ministral3(beta={parameters['llama_4_scaling_beta']},"
            f"length={parameters[TRAINED_LENGTH]})"
        ]
    return []


def _read_limit(config: Config) -> int:
    return int(getattr(config, "max_position_embeddings", None) or config.n_positions)


def _read_parameters(config: Config, kind: str) -> dict[str, Any]:
    """Read the rotations of the layers of a kind, in the words of transformers 5."""
    if config.model_type in ("codegen", "gptj"):
        width = config.n_embd // config.n_head
        return {"partial_rotary_factor": (config.rotary_dim or width) / width}
    parameters = getattr(config, "rope_parameters", None)
    if parameters is not None:
        return dict(parameters.get(kind, parameters))
    base, scaling = (
        getattr(config, "rope_theta", 10000.0),
        dict(getattr(config, "rope_scaling", None) or {}),
    )
    if config.model_type in ("gemma3_text", "olmo3") and kind == "sliding_attention":
        base, scaling = getattr(config, "rope_local_base_freq", base), {}  # not scaled
    if config.model_type in ("modernbert", "modernbert-decoder"):
        local = kind == "sliding_attention" and config.local_rope_theta is not None
        base, scaling = config.local_rope_theta if local else config.global_rope_theta, {}
    if scaling.get("rope_type", scaling.get("type")) == "longrope":
        # Up to transformers 4, the trained length stands beside the scaling, not in it.
        length = scaling[TRAINED_LENGTH] = getattr(config, TRAINED_LENGTH, None)
        scaling |= {"factor": None} if length else {}
    part = getattr(config, "partial_rotary_factor", 1.0)
    return {"rope_theta": base, "partial_rotary_factor": part, **scaling}


def _name(item: str) -> str:
    return item.partition("(")[0].strip()


def _read_options(item: str) -> dict[str, str]:
    """Read the options of an item of a spec as text."""
    inner = item.partition("(")[2].rstrip().removesuffix(")")
    pairs = [part.partition("=") for part in inner.split(",") if part.strip()]
    return {name.strip(): value.strip() for name, _, value in pairs}


def _change_options(items: list[str], written: str) -> tuple[list[str], set[str]]:
    """Change options of the items of a layer as ``own(...)`` has them; name those that exist."""
    changed, used = [], set()
    for item in items:
        name, options = _name(item), _read_options(item)
        for option, value in _read_options(written).items():
            if option in options_of(name):
                options[option] = value
                used.add(option)
        text = ",".join(f"{option}={value}" for option, value in options.items())
        changed.append(f"{name}({text})" if text else name)
    return changed, used
