"""Sampling: from the logits of a step to one token per row, reproducible per row. Face of the package.

| module | in charge of |
|---|---|
| `contract` | what a sampler promises, and the one definition of the choice |
| `choice` | which form serves an engine |
| `numpy_sampler`, `nucleus` | the form for logits in host memory |
| `torch_sampler` | the form for logits on a device |
| `device_plan`, `device_page` | what a step asks of the device, and how it gets there and back |
| `device_draw`, `device_history` | filters and draw without a sort; what penalties count |
| `device_array` | logits on a GPU as their interface describes them |
| `rows` | what is remembered of a sequence, for both forms |
| `philox` | one uniform per seed and position |
"""

from backend.sampling.choice import SamplerKind, choose_sampler
from backend.sampling.contract import Sampled, Sampler, SamplerRow
from backend.sampling.numpy_sampler import NumpySampler
from backend.sampling.torch_sampler import TorchSampler

__all__ = [
    "NumpySampler",
    "Sampled",
    "Sampler",
    "SamplerKind",
    "SamplerRow",
    "TorchSampler",
    "choose_sampler",
]
