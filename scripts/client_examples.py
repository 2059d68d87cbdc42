"""Calls to a running server, ready to paste into another terminal."""

from scripts.triton_runtime import TritonAddress

_EXAMPLES = """
# the whole answer
curl -s http://<http>/v2/models/<model>/generate -d \\
  '{"text_input": "The capital of France is", "max_tokens": 16}'

# streamed
curl -sN http://<http>/v2/models/<model>/generate_stream -d \\
  '{"text_input": "The capital of France is", "max_tokens": 16, "stream": true}'

# Python: one call with tritonclient.http
.venv/bin/python - <<'END'
import numpy as np, tritonclient.http as triton
client = triton.InferenceServerClient("<http>")
prompt = triton.InferInput("text_input", [1], "BYTES")
prompt.set_data_from_numpy(np.array([b"The capital of France is"], dtype=object))
most = triton.InferInput("max_tokens", [1], "INT32")
most.set_data_from_numpy(np.array([32], dtype=np.int32))
answer = client.infer("<model>_sync", [prompt, most])
print(answer.as_numpy("text_output")[0].decode(), "| cached:", answer.as_numpy("num_cached_tokens")[0])
client.close()
END

# Python: streamed with tritonclient.grpc
.venv/bin/python - <<'END'
import queue
import numpy as np, tritonclient.grpc as triton
prompt = triton.InferInput("text_input", [1], "BYTES")
prompt.set_data_from_numpy(np.array([b"The capital of France is"], dtype=object))
most = triton.InferInput("max_tokens", [1], "INT32")
most.set_data_from_numpy(np.array([32], dtype=np.int32))
stream = triton.InferInput("stream", [1], "BOOL")
stream.set_data_from_numpy(np.array([True]))
replies = queue.Queue()
with triton.InferenceServerClient("<grpc>") as client:
    client.start_stream(callback=lambda result, error: replies.put((result, error)))
    client.async_stream_infer("<model>", [prompt, most, stream], enable_empty_final_response=True)
    while True:
        result, error = replies.get(timeout=60)
        if error is not None:
            raise error
        if result.get_response().parameters["triton_final_response"].bool_param:
            break
        print(result.as_numpy("text_output")[0].decode(), end="", flush=True)
    client.stop_stream()
print()
END
"""


def client_examples(address: TritonAddress, model: str) -> str:
    """Curl and Python calls for the server at `address`."""
    http, grpc = f"{address.client_host}:{address.http_port}", f"{address.client_host}:{address.grpc_port}"
    return _EXAMPLES.replace("<http>", http).replace("<grpc>", grpc).replace("<model>", model)
