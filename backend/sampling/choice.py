"""Where sampling happens: on the device if the logits are there and torch can reach it, else on the host."""

import logging
from typing import Literal

from backend.errors import ConfigError, EngineFailed
from backend.sampling.contract import Sampler
from backend.sampling.numpy_sampler import NumpySampler
from backend.sampling.torch_sampler import TorchSampler, unusable

log = logging.getLogger(__name__)

SamplerKind = Literal["auto", "host", "device"]


def choose_sampler(kind: SamplerKind, *, device: str, vocab_size: int, lanes: int) -> Sampler:
    """The sampler for an engine whose logits are on `device` ("cpu" or "cuda:N") and which has `lanes` lanes.

    "device" raises ConfigError where "auto" falls back to the host, with one line of log that says why; both
    do so where the device has no room for a sampler.
    """
    if kind == "host":
        log.info("sampling on the host: sampler = host")
        return NumpySampler(vocab_size)
    reason = "the engine's logits are in host memory" if device == "cpu" else unusable(device)
    if reason is None:
        try:
            sampler = TorchSampler(vocab_size, lanes=lanes, device=device)
            sampler.warm_up()
        except EngineFailed as error:
            raise ConfigError(f"sampler: {error} (sampler `host` needs no room there)") from None
        log.info("sampling on %s", device)
        return sampler
    if kind == "device":
        raise ConfigError(f"sampler: device is not possible: {reason}")
    log.info("sampling on the host: %s", reason)
    return NumpySampler(vocab_size)
