"""What the reset of the first token costs: a layer's attention with it, against without.

Prints a Markdown table of processor-time ratios: medians over interleaved forward and backward
passes of one sentence pair in one thread. glibc gives large tensors back to the system after each
pass, and how long it takes to get them again depends on more than the code; keep it from that with
``MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000 MALLOC_TOP_PAD_=1000000000``.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor

from fairseq_posenc import registry
from fairseq_posenc.attention import PositionalAttention
from fairseq_posenc.encodings.base import Dims

BASE = Dims(embed_dim=768, num_heads=12, max_positions=512)
BATCH, PASSES = 2, 15


def make(spec: str) -> PositionalAttention:
    """Return a layer whose weights and tables are large enough to leave no denormal numbers."""
    encodings = registry.build(registry.parse(spec), BASE)
    attention = PositionalAttention(BASE.embed_dim, BASE.num_heads, encodings)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in attention.named_parameters():
        std = 0.3 if "encodings" in name else 0.03
        parameter.data.normal_(std=std, generator=generator)
    return attention


def seconds(attention: PositionalAttention, x: Tensor) -> float:
    """Return the processor time of a forward and backward pass."""
    began = time.process_time()
    attention(x, x, x, need_weights=False)[0].sum().backward()
    return time.process_time() - began


def main() -> None:
    """Print the table: the ratio with reset, and of two equal layers, which shows the noise."""
    torch.set_num_threads(1)
    x = torch.randn(BASE.max_positions, BATCH, BASE.embed_dim)
    print("| | with reset / without | without / without |\n| --- | ---: | ---: |")
    for name in (name for name in registry.names() if "reset" in registry.options(name)):
        if registry.get(name).shared:
            continue  # computed once for all layers
        layers = [make(name), make(f"{name}+reset"), make(name)]
        times = [[seconds(layer, x) for layer in layers] for _ in range(PASSES + 1)][1:]
        reset, same = (statistics.median(t[i] / t[0] for t in times) for i in (1, 2))
        print(f"| `{name}` | {reset:.3f} | {same:.3f} |", flush=True)


if __name__ == "__main__":
    main()
