"""DSpark's sequential Markov sampling as an operation of PyTorch."""

from .api import lm_head_beside_noise, markov_noise, markov_sample_sequential, new_draft_logits, why_not
from .fused import FusedMarkov
from .noise import gumbel_noise

__all__ = ["FusedMarkov", "gumbel_noise", "lm_head_beside_noise", "markov_noise", "markov_sample_sequential", "new_draft_logits", "why_not"]
