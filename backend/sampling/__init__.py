"""Sampling: from the logits of a step to one token per row, reproducible per row. Face of the package."""

from backend.sampling.contract import Sampled, Sampler, SamplerRow
from backend.sampling.numpy_sampler import NumpySampler

__all__ = ["NumpySampler", "Sampled", "Sampler", "SamplerRow"]
