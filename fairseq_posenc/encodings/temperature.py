"""Base of the temperatures that grow with the position."""

from abc import ABC, abstractmethod

from torch import Tensor

from fairseq_posenc.encodings.base import Encoding
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.positions import Positions, Span


class Temperature(Encoding, ABC):
    """A factor of all scores of a query, by its position; without parameters."""

    acts_on = "softmax"
    shared = True

    @abstractmethod
    def factors(self, positions: Tensor) -> Tensor:
        """Compute the factors at positions ``(B or 1, T)``, counted from 0, in float32."""

    def terms(self, span: Span, positions: Positions) -> Terms:
        """Multiply all scores of a query."""
        factors = self.factors(positions.queries(positions.ids).float())
        return Terms(temperature=factors.unsqueeze(1))
