"""Adapts state dicts of fairseq's models, and those with other position parameters, to a model.

All models of this package inherit :class:`PositionCheckpoints`. fairseq first calls its
``upgrade_state_dict_named``, torch then its ``_load_from_state_dict``; both adapt the state dict in
place.
"""

import logging
import re
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from fairseq_posenc.errors import UserError, counted
from fairseq_posenc.identity import STATE_KEY, Identity
from fairseq_posenc.position_parameters import extend_tables, fit_positions
from fairseq_posenc.specs import parse

logger = logging.getLogger(__name__)
STOCK_SINUSOIDS = ("embed_positions._float_tensor", "embed_positions.weights")
STOCK_SPEC = "sinusoidal(layout=fairseq)"  # of fairseq's models that have one of these keys
STOCK_TABLE = "embed_positions.weight"  # learned positions in fairseq's models
LEARNED_TABLE = "embed_positions.encodings.learned.table.weight"  # and in ours
# Copies of weights, which encoder layers of fairseq 0.12.2 have for its fast path.
COPIES = [f"{x}_{y}" for x in ("in_proj", "out_proj", "fc1", "fc2") for y in ("weight", "bias")]
COPY_NAME = re.compile(rf"\.layers\.\d+\.(?:{'|'.join(COPIES)})$")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
STOCK_OFFSET = 2  # rows before position 0: padding_idx + 1, and fairseq's padding_idx is 1


@runtime_checkable
class IdentifiedStack(Protocol):
    """An encoder or decoder that knows what its weights were trained with."""

    identity: Identity  # positions and settings of its weights
    layers_kept: list[int] | None  # indices of the trained layers that it has; None for all
    init_positions: bool  # --init-positions: a checkpoint's other positions are replaced


class PositionCheckpoints(nn.Module):
    """Mixin for models: adapts a checkpoint's position parameters before they are loaded."""

    num_updates: int | None = None  # made so far; None before training, unless a file was loaded
    # The checkpoint whose optimizer state fairseq loads after its weights; None if it loads none.
    # `fairseq_posenc.host.preparation` sets it before fairseq loads either.
    optimizer_source: Path | None = None

    def set_num_updates(self, num_updates: int) -> None:
        """Keep the number of updates, which fairseq gives at loading and before each batch."""
        self.num_updates = num_updates
        super().set_num_updates(num_updates)  # type: ignore[misc]

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        """Rename the position parameters of fairseq's models, and drop copies of weights."""
        for key in filter(COPY_NAME.search, list(state_dict)):
            del state_dict[key]
        super().upgrade_state_dict_named(state_dict, name)  # type: ignore[misc]
        for key in [key for key in state_dict if key.endswith(STOCK_TABLE)]:
            table = state_dict.pop(key)
            if not isinstance(table, Tensor) or table.dim() != 2:
                found = tuple(table.shape) if isinstance(table, Tensor) else type(table).__name__
                raise UserError(f"the checkpoint is damaged: {key} must be a table, not {found}")
            state_dict[key.removesuffix(STOCK_TABLE) + LEARNED_TABLE] = table[STOCK_OFFSET:]

    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Check and adapt the checkpoint, then load it; fairseq has already pruned layers.

        Raises:
            UserError: positions differ and ``--init-positions`` was not given, the weights mean
                something else in this model, or some are not finite.
        """
        model_state = self.state_dict(prefix=prefix)
        refuse_broken_weights(state_dict, model_state)
        _refuse_other_dictionary(state_dict, model_state)
        stacks = {name: x for name, x in self.named_modules() if isinstance(x, IdentifiedStack)}
        changes, identities = _match_identities(stacks, state_dict, prefix)
        for key in [key for key in state_dict if key.endswith(STOCK_SINUSOIDS)]:
            del state_dict[key]  # markers without weights
        state_dict |= {f"{name}.{STATE_KEY}": x.to_tensor() for name, x in identities.items()}
        is_pruned = any(x.layers_kept for x in stacks.values())  # then shared weights may be unused
        for key in [x for x in state_dict if ".encodings." in x and x not in model_state]:
            query = key.replace(".key_projection", ".query_projection")
            # Of a tied projection, earlier files have a copy under the name of keys.
            is_copy = query != key and state_dict[key].equal(state_dict.get(query, torch.empty(0)))
            if not changes and (is_pruned or is_copy):
                del state_dict[key]  # else `fit_positions` drops it
        # Both change the state dict, and say how: tables by distance grow, misfits are replaced.
        extended_tables = extend_tables(self, state_dict, prefix)
        replaced_parameters = fit_positions(state_dict, model_state)
        changes += replaced_parameters
        trained = sum(".fc1.weight" in name for name in state_dict)  # layers: each has one
        built = sum(".fc1.weight" in name for name in model_state)
        if changes and trained != built:  # without changes, torch lists the layers that differ
            fault = f"the checkpoint has {counted(trained, 'layers')}, the model {built}"
            raise UserError(f"{fault}: build it with {trained}")
        if changes and not all(stack.init_positions for stack in stacks.values()):
            raise UserError(
                "the checkpoint's positions are not the model's (--init-positions, in hydra "
                "+model.init_positions=true, starts the model's own fresh; a table by position "
                "fits a model of its length (with --add-bos-token, --tokens-per-sample + 1)): "
                f"{'; '.join(changes)}"
            )
        refuse_untied(state_dict, model_state)
        if (resized := extended_tables + replaced_parameters) and self.optimizer_source:
            raise UserError(
                f"the optimizer's state in {self.optimizer_source} is for other sizes: "
                f"{resized[0]}; keep the lengths of the training, or continue training with "
                "--reset-optimizer, in hydra checkpoint.reset_optimizer=true"
            )
        for change in changes:
            logger.warning("--init-positions: %s", change)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _match_identities(
    stacks: dict[str, IdentifiedStack], state_dict: dict[str, Tensor], prefix: str
) -> tuple[list[str], dict[str, Identity]]:
    """Compare the identity of each stack with the checkpoint's; refuse other settings of weights.

    Return how positions differ, and the identities to load, by the names of stacks in the state
    dict; where positions differ, the model's, as its position parameters will be loaded.
    """
    identities, changes, mismatches = {}, [], []
    for name, stack in stacks.items():
        trained = _read_identity(state_dict, f"{prefix}{name}.", stack.identity)
        ours, theirs = stack.identity.weight_settings, trained.weight_settings
        mismatches += [f"{name}: {difference}" for difference in theirs.differences(ours)]
        if unknown := theirs.list_unknown(ours):
            logger.info("%s: the checkpoint does not record its %s", name, ", ".join(unknown))
        differences = trained.position_differences(stack.identity, layers=stack.layers_kept)
        changes += [f"{name}: {difference}" for difference in differences]
        # The weights keep their settings; the model fills in those that the file lacks.
        loaded = stack.identity if differences else trained
        identities[prefix + name] = loaded._replace(weight_settings=theirs.fill_unknown_from(ours))
    if mismatches:
        raise UserError(
            "the checkpoint's weights mean something else in this model: "
            f"{'; '.join(mismatches)}; give it the settings and the dict.txt of its training"
        )
    return changes, identities


def _read_identity(state_dict: dict[str, Tensor], prefix: str, ours: Identity) -> Identity:
    """Read the identity of a stack, whose parameters' names begin with ``prefix``.

    Those of fairseq have none, but a table of learned positions (renamed), or markers of sinusoids.
    """
    if prefix + STATE_KEY in state_dict:
        return Identity.from_tensor(state_dict[prefix + STATE_KEY])
    if any(prefix + marker in state_dict for marker in STOCK_SINUSOIDS):
        return ours._replace(positions=parse(STOCK_SPEC))
    has_table = prefix + LEARNED_TABLE in state_dict
    if has_table and all(item.name != "learned" for item in ours.positions.items):
        return ours._replace(positions=parse("learned"))
    if not has_table or str(ours.positions) != "learned":  # else the table shows it
        text = "%s: the checkpoint did not record positions; assuming %s"
        logger.warning(text, prefix.removesuffix("."), ours.positions)
    return ours


def _refuse_other_dictionary(state_dict: dict[str, Tensor], model_state: dict[str, Tensor]) -> None:
    """Refuse token embeddings for another number of symbols."""
    for key, ours in model_state.items():
        theirs = state_dict.get(key, ours)
        # Torch reports a weight of another number of dimensions.
        is_table = key.endswith("embed_tokens.weight") and theirs.dim() == ours.dim()
        if is_table and len(theirs) != len(ours):
            raise UserError(
                f"the checkpoint has a dictionary of {len(theirs):,} symbols ({key}), the data one "
                f"of {len(ours):,}: every model needs data with the dict.txt of its training"
            )


def refuse_broken_weights(state_dict: dict[str, Tensor], model_state: dict[str, Tensor]) -> None:
    """Refuse NaN, infinity and other types of numbers, which torch would silently copy or convert.

    Only floating-point parameters are checked, and no identity: its tensor is an encoded text.
    """
    for name, parameter in model_state.items():
        if name not in state_dict or not parameter.is_floating_point() or name.endswith(STATE_KEY):
            continue
        if wrong := _describe_wrong_numbers(state_dict[name]):
            raise UserError(f"the checkpoint is damaged, or its training diverged: {name} {wrong}")


def refuse_untied(state_dict: dict[str, Tensor], model_state: dict[str, Tensor]) -> None:
    """Refuse two different matrices for a shared one: torch would keep the second of them."""
    first_names: dict[int, str] = {}  # by the address of the model's storage
    for name, parameter in model_state.items():
        address = _storage_address(parameter)
        weight = state_dict.get(name)
        if weight is None or _storage_address(weight) == address or not address:
            continue  # missing; the model's own, which `fit_positions` put there; or on "meta"
        first_name = first_names.setdefault(address, name)
        first = state_dict[first_name]
        if _storage_address(weight) != _storage_address(first) and not torch.equal(weight, first):
            raise UserError(
                f"the checkpoint's {name} is not its {first_name}, and this model shares them: "
                "build it as it was trained (--no-share-decoder-input-output-embed for a causal "
                "LM, --untie-weights-roberta for a masked one, no --share-... for translation)"
            )


def _storage_address(x: Tensor) -> int:
    """Get the address of a tensor's storage, which is the same for tensors that share it."""
    return x.untyped_storage().data_ptr()


def _describe_wrong_numbers(weight: Any) -> str | None:
    """Describe why the numbers of a tensor cannot be a weight's; None if they can."""
    if not isinstance(weight, Tensor):
        return f"is not a tensor, but of the type {type(weight).__name__}"
    if weight.dtype not in _FLOATS:
        return f"holds numbers of the type {weight.dtype}, not floating-point ones"
    # A sum needs no memory for a mask. Elements are counted only if it is not finite.
    total = weight.sum(dtype=torch.promote_types(weight.dtype, torch.float32))
    if total.isfinite() or not (broken := int((~weight.isfinite()).sum())):
        return None  # also finite numbers of which only the sum overflows
    return f"has {broken:,} of {weight.numel():,} numbers that are NaN or infinite"
