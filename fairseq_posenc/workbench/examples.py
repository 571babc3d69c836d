"""The examples that end each command's help, in ``examples.json``; a test parses them all.

``EXAMPLES["list"]`` has those of ``fairseq-posenc list``, ``EXAMPLES["squad train"]`` those of a
subcommand.
"""

import json
from pathlib import Path

EXAMPLES: dict[str, list[str]] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
