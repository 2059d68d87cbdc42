"""A double of pb_utils: the few names that responses and calls inside the server are made of."""

import json
from types import SimpleNamespace

FINAL = 1


class FakePb:
    TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL

    class TritonError(Exception):
        INTERNAL, INVALID_ARG, UNAVAILABLE = "INTERNAL", "INVALID_ARG", "UNAVAILABLE"

        def __init__(self, message, code):
            super().__init__(message)
            self.code = code

        def message(self):
            return str(self)

    @staticmethod
    def Tensor(name, array):  # noqa: N802  (names are Triton's)
        return SimpleNamespace(name=lambda: name, array=array, as_numpy=lambda: array)

    @staticmethod
    def InferenceResponse(output_tensors=None, error=None):  # noqa: N802
        return SimpleNamespace(
            output_tensors=lambda: output_tensors or [],
            error=lambda: error,
            has_error=lambda: error is not None,
        )


class Wire:
    """A response sender that remembers, and refuses questions after FINAL as the real one may."""

    def __init__(self, *, cancelled=False):
        self.sent = []
        self.cancelled = cancelled

    def send(self, response=None, flags=0):
        self.sent.append((response, flags))

    def is_cancelled(self):
        assert not any(flags == FINAL for _, flags in self.sent), "asked after FINAL"
        return self.cancelled


class DecoderPb:
    """pb_utils in a facade: `answer(question)` gives the decoder's responses; floats are refused."""

    def __init__(self, answer):
        self.questions = []
        self._answer = answer

    def __getattr__(self, name):
        return getattr(FakePb, name)

    def InferenceRequest(self, **question):  # noqa: N802
        for value in question["parameters"].values():
            if type(value) not in (bool, int, str):
                kind = type(value).__name__
                raise RuntimeError(f"Expect parameters values to have type bool/int/str, found {kind}")
        self.questions.append(question)
        return SimpleNamespace(exec=lambda decoupled: iter(self._answer(question)))


def request(wire, parameters=None, inputs=(), outputs=(), timeout=0):
    return SimpleNamespace(
        parameters=lambda: json.dumps(parameters or {}), inputs=lambda: list(inputs), timeout=lambda: timeout,
        request_id=lambda: "r1", requested_output_names=lambda: list(outputs),
        get_response_sender=lambda: wire,
    )  # fmt: skip
