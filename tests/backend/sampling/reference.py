"""Sampling written plainly, one row in float64 with full sorts: what the numpy sampler is checked against."""

import numpy as np
import numpy.typing as npt

from backend.generation import SamplingParams


def distribution(
    logits: npt.NDArray[np.float32],
    params: SamplingParams,
    *,
    prompt: list[int],
    output: list[int],
    banned: set[int] = frozenset(),
) -> npt.NDArray[np.float64]:
    """Probabilities [V] of the next token, by Python loops over a sorted list."""
    scores = [float(x) for x in logits]
    for token in set(prompt) | set(output):
        rate = params.repetition_penalty
        scores[token] = scores[token] / rate if scores[token] > 0 else scores[token] * rate
    for token in set(output):
        scores[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    for token in banned:
        scores[token] = -np.inf
    peak = max(scores)
    weights = [np.exp((score - peak) / params.temperature) for score in scores]
    ranked = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    if params.top_k:
        ranked = ranked[: params.top_k]
    if params.top_p < 1:
        goal, mass, nucleus = params.top_p * sum(weights[t] for t in ranked), 0.0, []
        for token in ranked:
            if mass >= goal:
                break
            nucleus.append(token)
            mass += weights[token]
        ranked = nucleus
    ranked = [token for token in ranked if weights[token] >= params.min_p]
    kept = np.zeros(len(weights))
    kept[ranked] = [weights[token] for token in ranked]
    return kept / kept.sum()


def cut_margin(probabilities: npt.NDArray[np.float64], top_p: float) -> float:
    """How far the nucleus is from having one token more or less: float32 weights cannot decide below 1e-6."""
    mass = np.cumsum(np.sort(probabilities)[::-1])
    return float(np.abs(mass - top_p).min())
