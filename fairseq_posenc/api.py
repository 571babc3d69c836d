"""Public classes for PyTorch models of any kind; they need no fairseq.

Give your model a :class:`StackPositions`, with the encodings that you choose (``m4m``: vectors by
distance), and each layer a :class:`SelfAttention`:

>>> import torch
>>> positions = StackPositions("learned+m4m", embed_dim=768, num_heads=12, max_positions=512)
>>> layers = [SelfAttention(positions, dropout=0.1) for _ in range(12)]
>>> x, shared = positions(torch.randn(2, 64, 768))  # once per pass; `shared` is for all layers
>>> x = x + layers[0](x, shared)[0]
>>> x.shape
torch.Size([2, 64, 768])

If your model computes its attention itself, use :class:`LayerPositions` instead.

A decoder also has :class:`CrossAttention`; a :class:`Cache` keeps keys and values between steps:

>>> positions = StackPositions("rope", embed_dim=64, num_heads=4, causal=True)
>>> layer, cross, cache = SelfAttention(positions), CrossAttention(positions), Cache()
>>> source = torch.randn(2, 7, 64)  # an encoder's output
>>> tokens = torch.randn(2, 5, 64)
>>> for i in range(5):
...     x, shared = positions(tokens[:, [i]], past=i)
...     step, _ = cross(layer(x, shared, cache)[0], source, shared)
>>> step.shape
torch.Size([2, 1, 64])
>>> cache.reorder(torch.tensor([1, 1]))  # both beams continue the second one

To inspect or test an encoding, :class:`PositionEncoding` has all its parts for a single layer:

>>> encoding = PositionEncoding("learned+m4m", embed_dim=768, num_heads=12)
>>> encoding.parameter_counts()
{'input.learned.table.weight': 393216, 'encodings.m4m.table.weight': 65472}
>>> query, key = torch.randn(2, 1, 12, 64, 64)
>>> encoding.scores(query, key).shape  # (batch, heads, tgt_len, src_len)
torch.Size([1, 12, 64, 64])
>>> encoding.distance_curve(64).shape  # mean scores at distances -64 to 64, for each head
torch.Size([12, 129])
"""

from fairseq_posenc.modules.attention import CrossAttention, SelfAttention
from fairseq_posenc.modules.attention_core import Cache
from fairseq_posenc.modules.layer_positions import LayerPositions, PositionEncoding
from fairseq_posenc.modules.stack_positions import StackPositions

__all__ = [
    "Cache",
    "CrossAttention",
    "LayerPositions",
    "PositionEncoding",
    "SelfAttention",
    "StackPositions",
]
