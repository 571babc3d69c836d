"""Explains errors of fairseq that a user can fix, in one line each, which `startup` prints."""

import re
import traceback
import weakref
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from fairseq import registry
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError
from omegaconf.errors import OmegaConfBaseException as SettingError

from fairseq_posenc.checkpoints.state_dict_adapter import PositionCheckpoints
from fairseq_posenc.errors import chain, shortened, suggest
from fairseq_posenc.transformer.options import list_settings

# The models that this process trains, the current one last -> the folder of their checkpoints.
save_dirs: weakref.WeakKeyDictionary[PositionCheckpoints, str] = weakref.WeakKeyDictionary()
FITTING_TASKS = (  # in messages: the --task and --criterion that the models need
    "roberta_* and decbert_* are trained with --task masked_lm --criterion masked_lm, "
    "transformer_lm_* with --task language_modeling, transformer_* with --task translation"
)
# How errors begin, or where fairseq raises them -> what to say; \1: a group, \g<0>: the match.
_ADVICE = {
    r"\"'_name'\"|Could not infer task": "fairseq has no model._name, or task._name, of this name; "
    "in Python, from_pretrained needs user_dir='fairseq_posenc'",  # of a KeyError("'_name'")
    r"Interpolation key 'task\.|Unsupported language modeling target|.* a FairseqMultiModel": (
        f"the model does not fit the task: {FITTING_TASKS}"
    ),
    "Could not infer language pair": "the data folder has no file such as train.de-en.de.idx: give "
    "a data-bin of pairs, or --task language_modeling",
    r"(\w+) is required!": r"no \1 is chosen: give one, as in --optimizer adam",
    r"(?s)field '.*\.(\w+)' is not Optional": r"the setting \1 needs a value: give one, as an "
    "option of this name with - for _",
    r"(?s)Invalid value assigned: .* is not a ListConfig.*full_key: (\S+)": r"\1 is a list: write "
    r"brackets, as in \1=[0.001]",
    r"(?s)(?:Error parsing override|Ambiguous value for argument) '([^=]+)=([^'\n]+)'.*"
    "(?:Unknown function|sweep over it)": "a value with parentheses or commas needs its own quotes "
    "within the shell's: \"\\1='\\2'\"",
    r"(?s)Error parsing override '([^'\n]+)'.*missing EQUAL": r"\1 is not a setting: write "
    "KEY=VALUE, as in model.position_encoding=m4m",
    r"The dataset is empty|IndexError in data_utils|ZeroDivisionError in \w+\.(_main|reduce)": "a "
    "split has no batches: if the log counts samples of invalid sizes, they are longer than the "
    "model reads; else fairseq dropped them: give --required-batch-size-multiple 1",
    r".*should not exceed max_tokens=(\d+)": r"a sample is longer than --max-tokens \1: give more",
    "Dataset not found: (.*)": r"the data have no split \1: name their folder, and a split of it",
    r"world size is \d+ but|.* device_ids and": "fewer GPUs than --distributed-world-size: "
    "give as many as there are, or all options of docs/cluster.md for processes without GPUs",
    ".*(torch_xla|xla_device)'": "--tpu needs torch_xla, which is not installed: leave it out",
    "Cannot resume training due": "data or batches changed: --reset-dataloader begins epoch 1",
    r"AssertionError in (poly|tri)\w+.__init__: $": "give max_update, perhaps warmup_updates too",
    "KeyError in train.validate: (.+)": r"validation gives no metric \1 (--best-checkpoint-metric)",
    "KeyError in options.parse_args_and_arch": "give --task, as in --task language_modeling",
    r"TypeError in utils.split_paths|AttributeError in \w+.get_maybe": "give --path, or task.data",
    "TypeError in search.init_constraints": "--constraints are read by fairseq-interactive alone",
    r"ValueError in ast\.|SyntaxError in (ast|eval_lm|validate)\.": "a setting, such "
    "as --model-overrides, is not a Python literal such as \"{'data': 'data-bin/wiki'}\"",
    r"(--[a-z-]+ \w|AdaptiveLoss is not |Cannot find \w+DataParallel|Constrained decoding |"
    r"(Criterion|Optimizer) does not match|DiverseBeamSearch requires |Must specify |Either --max|"
    r"Size of sample #|Valid paths |cannot specify cutoff |min_len cannot ).{,250}": r"\g<0>",
    ".* has no attribute 'eval_lm_dataloader'": "fairseq-eval-lm is for --task language_modeling: "
    "evaluate a translation model by fairseq-generate or fairseq-posenc translate",
    "'MaskedLMTask' object has no attribute 'args'": "--mask-whole-words does not work: omit it",
    "Torch not compiled with CUDA": "an option needs a GPU, such as --quant-noise-scalar: omit it",
}
_PACKAGES = re.escape(str(Path(registry.__file__).parents[1]))  # where fairseq is installed
_CODE = rf"({_PACKAGES}/)?fairseq(_cli)?/|.*/fairseq_posenc/"  # Cython leaves the folder out


def explain_failure(error: BaseException) -> str | None:
    """Explain an error of a command, or its first known cause."""
    if isinstance(error, KeyboardInterrupt):
        return "stopped; the command, without --restore-file, continues from its checkpoint, if any"
    return next(filter(None, map(_explain, chain(error))), None)


def _explain(error: BaseException) -> str | None:
    """Explain a divergence, an error of ``_ADVICE`` or hydra, an unknown name, a missing file."""
    if isinstance(error, FloatingPointError) and save_dirs:
        model, save_dir = list(save_dirs.items())[-1]  # the current one; it counts whole updates
        return (
            f"training stopped at update {(model.num_updates or 0) + 1:,}: {error}; checkpoints in "
            f"{save_dir}, except crash.pt, are from before: continue from one of them with a "
            "smaller --lr, or with --clip-norm"
        )
    frames = traceback.extract_tb(error.__traceback__)
    others = [x for x in frames if Path(x.filename).stem != "ast"]  # its frames are its caller's
    last = frames[-1:] if others and re.match(_CODE, others[-1].filename) else []
    place = "".join(f"{type(error).__name__} in {Path(x.filename).stem}.{x.name}" for x in last)
    for start, advice in _ADVICE.items():
        if match := re.match(start, str(error)) or re.match(start, f"{place}: {error}"):
            return re.sub(r"np\.\w+\((\d+)\)", r"\1", match.expand(advice))  # numbers of numpy 2
    if isinstance(error, SettingError):
        name = error.full_key or error.key
        reason = shortened(" ".join(str(error).splitlines()[0].split()))
        if isinstance(error, ConfigKeyError | ConfigAttributeError):
            # "is not in struct": the file of settings lacks it.
            add = f"; +{name}=VALUE adds it to the file's settings" if "struct" in reason else ""
            return f"there is no setting {name}: {_suggest_settings(error)}{reason}{add}"
        return f"the setting {name}: {reason}" if name else reason
    # A setting that caused hydra's error explains more: `chain` yields it next.
    if isinstance(error, HydraException) and not isinstance(error.__cause__, SettingError):
        return shortened(" ".join(re.split("Config search path|See https", str(error))[0].split()))
    if place == "KeyError in registry.build_x":
        known = [name for part in registry.REGISTRIES.values() for name in part["registry"]]
        return f"fairseq has no {error}: {suggest(str(error.args[0]), known)}correct this name"
    if not isinstance(error, FileNotFoundError | NotADirectoryError) or not error.filename:
        return None
    path = Path(error.filename)
    if not path.parent.is_dir():  # it is a file, or does not exist
        advice = "run fairseq-posenc preprocess, or " if path.match("dict*.txt") else ""
        return f"there is no folder {path.parent}: {advice}correct its name"
    if not path.match("dict*.txt"):
        return f"there is no file or folder {path}: correct its name"
    files = sorted(map(str, [*path.parent.glob("dict*.txt"), *path.parent.glob("*/dict*.txt")]))
    return (
        f"{path.parent} has no {path.name}; tasks of running text read dict.txt, and those of "
        f"pairs dict.LANG.txt; found: {', '.join(files) or 'no dictionary'}"
    )


def _suggest_settings(error: ConfigKeyError | ConfigAttributeError) -> str:
    """Suggest settings, of any section, for a name that one of hydra's sections lacks."""
    key, section = str(error.key), error.parent_node
    if not isinstance(section, DictConfig):
        return ""
    own = {*map(str, section), *list_settings(section.get("_name"))}
    if key in own:
        return ""  # a setting of the model, which the file does not name
    root: Any = section._get_root()  # all sections; `${...}` stays unresolved
    parts = reversed([(k, x) for k, x in root.items_ex(resolve=False) if isinstance(x, DictConfig)])
    known = {str(k): f"{name}.{k}" for name, part in parts for k in part}  # of several, the first
    known |= {name: name for name in own}
    near = [key] if key in known else get_close_matches(key, known, n=2)
    return f"did you mean {' or '.join(known[name] for name in near)}? " if near else ""
