"""Runs inside a peer's own Python: loads one peer's model and answers questions, a JSON line for a JSON line.

It needs nothing but the standard library, numpy and the peer. Times are taken here, around the peer's own
calls, so that the pipe costs the peer nothing.
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, BinaryIO, Protocol

Answer = dict[str, Any]


class PeerEngine(Protocol):
    """What both peers can be asked. `variant` names a way to run the peer."""

    def prefill(self, tokens: list[int], variant: str) -> float:
        """Seconds until the first token is known. A prompt that OpenVINO's PA has seen is a hit there."""
        ...

    def decode(self, tokens: list[int], variant: str, count: int) -> float:
        """Seconds of `count` greedy decode steps of one sequence after the prompt."""
        ...


class LlamaCpp:
    """llama.cpp through llama-cpp-python's low-level evaluation."""

    def __init__(self, gguf: str, threads: int) -> None:
        self._gguf, self._threads = gguf, threads
        self._module = importlib.import_module("llama_cpp")
        self._numpy = importlib.import_module("numpy")
        self._loaded: dict[str, Any] = {}

    def _model(self, variant: str) -> Any:
        if variant not in self._loaded:
            self._loaded[variant] = self._module.Llama(
                self._gguf, n_ctx=4096, n_batch=2048, n_ubatch=512, n_threads=self._threads,
                n_threads_batch=self._threads, flash_attn=variant == "flash", verbose=False,
            )  # fmt: skip
        return self._loaded[variant]

    def prefill(self, tokens: list[int], variant: str) -> float:
        """`reset` makes the next evaluation start at position 0."""
        model = self._model(variant)
        model.reset()
        started = time.perf_counter()
        model.eval(tokens)
        return time.perf_counter() - started

    def decode(self, tokens: list[int], variant: str, count: int) -> float:
        """Greedy, by numpy's argmax over the logits in place, as our side does it."""
        model = self._model(variant)
        model.reset()
        model.eval(tokens)
        read, vocabulary = self._module.llama_get_logits, model.n_vocab()
        token = tokens[-1]
        started = time.perf_counter()
        for _ in range(count):
            model.eval([token])
            logits = self._numpy.ctypeslib.as_array(read(model.ctx), shape=(vocabulary,))
            token = int(logits.argmax())
        return time.perf_counter() - started


class OpenVino:
    """OpenVINO GenAI, which loads the GGUF file itself; PA caches prefixes, SDPA is the stateful pipeline."""

    def __init__(self, gguf: str, threads: int) -> None:
        self._gguf, self._threads = gguf, threads
        self._genai = importlib.import_module("openvino_genai")
        self._openvino = importlib.import_module("openvino")
        self._numpy = importlib.import_module("numpy")
        self._loaded: dict[str, Any] = {}

    def _pipeline(self, variant: str) -> Any:
        if variant not in self._loaded:
            options: dict[str, Any] = {"INFERENCE_NUM_THREADS": self._threads, "ATTENTION_BACKEND": variant}
            if variant == "PA":
                scheduler = self._genai.SchedulerConfig()
                scheduler.enable_prefix_caching = True
                scheduler.cache_size = 1
                options["scheduler_config"] = scheduler
            self._loaded[variant] = self._genai.LLMPipeline(self._gguf, "CPU", **options)
        return self._loaded[variant]

    def _generate(self, tokens: list[int], variant: str, count: int) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = count, True, False
        prompt = self._openvino.Tensor(self._numpy.array([tokens], dtype=self._numpy.int64))
        return self._pipeline(variant).generate(prompt, config).perf_metrics

    def prefill(self, tokens: list[int], variant: str) -> float:
        """OpenVINO's own time to first token."""
        return float(self._generate(tokens, variant, 1).get_ttft().mean) / 1e3

    def decode(self, tokens: list[int], variant: str, count: int) -> float:
        """OpenVINO's own time per output token."""
        return float(self._generate(tokens, variant, count + 1).get_tpot().mean) / 1e3 * count


ENGINES: dict[str, Callable[[str, int], PeerEngine]] = {"llamacpp": LlamaCpp, "openvino": OpenVino}


def answer(engine: PeerEngine, question: Answer) -> Answer:
    """One answer; an exception of the peer becomes {"error": ...}: the next question may still work."""
    fields = {name: value for name, value in question.items() if name != "op"}
    try:
        match question["op"]:
            case "hello":
                return {"ready": True}
            case "prefill":
                return {"seconds": engine.prefill(**fields)}
            case "decode":
                return {"seconds": engine.decode(**fields)}
            case unknown:
                return {"error": f"unknown op {unknown!r}"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def serve(engine: PeerEngine, questions: BinaryIO, answers: BinaryIO) -> None:
    """Answer until the other side closes the pipe."""
    for line in questions:
        answers.write(json.dumps(answer(engine, json.loads(line))).encode() + b"\n")
        answers.flush()


def main() -> None:
    """Arguments: peer, GGUF file, threads. Whatever the peer prints goes to stderr, the pipe stays clean."""
    kind, gguf, threads = sys.argv[1:4]
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(ENGINES[kind](gguf, int(threads)), sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
